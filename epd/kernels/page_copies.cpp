// Copies pages of keys and values in the background, without a word of Python once a copy is under way.
//
// One thread calls `mimo_copies_run` and does the work of a queue, part by part: a part is one layer's keys or values of
// all pages of a job. Before every part the first load goes before all saves, for somebody may be waiting for it.

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

namespace {

// As `_Part` in page_copies.py. Page p of one side is at base + p * stride.
struct Part {
    char* device;
    char* host;
    int64_t device_stride;
    int64_t host_stride;
    int64_t size_bytes;
    int64_t pool;
};

struct Pair {
    int64_t source;
    int64_t target;
};

struct Job {
    bool is_load;
    std::vector<Pair> pairs[2];  // by pool
    std::vector<Pair> local;     // device to device, pool 1
    int64_t* num_done;           // parts; the caller's, to read at any time
};

struct Copies {
    std::vector<Part> parts;  // in the order of the forward
    std::mutex mutex;
    std::condition_variable wanted, moved;
    std::deque<Job*> loads, saves;
    bool is_closed = false;
};

void copy(const Part& part, const Job& job) {
    const size_t size = static_cast<size_t>(part.size_bytes);
    for (const Pair& pair : job.pairs[part.pool]) {
        if (job.is_load) {
            std::memcpy(part.device + pair.target * part.device_stride, part.host + pair.source * part.host_stride, size);
        } else {
            std::memcpy(part.host + pair.target * part.host_stride, part.device + pair.source * part.device_stride, size);
        }
    }
    if (part.pool == 1) {
        for (const Pair& pair : job.local) {
            std::memcpy(part.device + pair.target * part.device_stride, part.device + pair.source * part.device_stride,
                        size);
        }
    }
}

}  // namespace

extern "C" {

void* mimo_copies_new(const Part* parts, int64_t num_parts) {
    auto* copies = new Copies;
    copies->parts.assign(parts, parts + num_parts);
    return copies;
}

// Works until `mimo_copies_close`, and until all that was asked for before is done.
void mimo_copies_run(void* handle) {
    auto& copies = *static_cast<Copies*>(handle);
    std::unique_lock<std::mutex> lock(copies.mutex);
    while (true) {
        copies.wanted.wait(lock, [&] { return copies.is_closed || !copies.loads.empty() || !copies.saves.empty(); });
        if (copies.loads.empty() && copies.saves.empty()) return;
        auto& queue = copies.loads.empty() ? copies.saves : copies.loads;
        Job* job = queue.front();
        int64_t* num_done = job->num_done;
        const int64_t part = *num_done;
        lock.unlock();
        copy(copies.parts[part], *job);
        lock.lock();
        if (part + 1 == static_cast<int64_t>(copies.parts.size())) {
            queue.pop_front();
            delete job;
        }
        // Once the last part is told, the caller may give its memory back.
        __atomic_store_n(num_done, part + 1, __ATOMIC_RELEASE);
        copies.moved.notify_all();
    }
}

// `pairs`: first those of pool 0, then of pool 1, then those on the device. `num_done` is 0, and counts parts.
void mimo_copies_start(void* handle, int is_load, const Pair* pairs, const int64_t counts[3], int64_t* num_done) {
    auto& copies = *static_cast<Copies*>(handle);
    auto* job = new Job{is_load != 0, {}, {}, num_done};
    const Pair* next = pairs;
    std::vector<Pair>* lists[] = {&job->pairs[0], &job->pairs[1], &job->local};
    for (int i = 0; i < 3; ++i) {
        lists[i]->assign(next, next + counts[i]);
        next += counts[i];
    }
    {
        std::lock_guard<std::mutex> lock(copies.mutex);
        (job->is_load ? copies.loads : copies.saves).push_back(job);
    }
    copies.wanted.notify_one();
}

int64_t mimo_copies_num_done(const int64_t* num_done) { return __atomic_load_n(num_done, __ATOMIC_ACQUIRE); }

void mimo_copies_wait(void* handle, const int64_t* num_done, int64_t num_parts) {
    auto& copies = *static_cast<Copies*>(handle);
    std::unique_lock<std::mutex> lock(copies.mutex);
    copies.moved.wait(lock, [&] { return *num_done >= num_parts; });
}

void mimo_copies_close(void* handle) {
    auto& copies = *static_cast<Copies*>(handle);
    {
        std::lock_guard<std::mutex> lock(copies.mutex);
        copies.is_closed = true;
    }
    copies.wanted.notify_all();
}

// After `mimo_copies_run` has returned.
void mimo_copies_delete(void* handle) { delete static_cast<Copies*>(handle); }
}
