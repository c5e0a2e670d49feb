// Attention of a few query rows per sequence over paged keys and values: reads every visible key and value once, where
// it lies, and keeps nothing but a running softmax. Plain C++ with the compiler's own vectors, no headers of torch.
//
// Letters: N query heads; K KV heads; G query heads per KV head; H key width; V value width; P tokens per page.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kLanes = 16;
constexpr int kPair = 2 * kLanes;
constexpr int kBlock = 16;        // tokens whose scores are held at a time
constexpr int64_t kSplit = 256;  // tokens per task: fixed, so that sums do not depend on batch or threads

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));

struct Bf16 {
  uint16_t bits;
};

inline Vec load(const float* at) { return *reinterpret_cast<const Vec*>(at); }
inline void store(float* at, Vec x) { *reinterpret_cast<Vec*>(at) = x; }

inline void load_pair(const float* at, Vec& a, Vec& b) {
  a = load(at);
  b = load(at + kLanes);
}
// The even and the odd elements: a shift and a mask, where in order would take several shuffles.
inline void load_pair(const Bf16* at, Vec& a, Vec& b) {
  const Bits both = *reinterpret_cast<const Bits*>(at);
  a = reinterpret_cast<Vec>(both << 16);
  b = reinterpret_cast<Vec>(both & 0xffff0000u);
}
inline float one(float x) { return x; }
inline float one(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline float sum(Vec x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
  return x[0] + x[1];
}

template <typename T>
inline void fetch(const T* at, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(at + i, 0, 2);
}

// Where load_pair puts element i of a width.
template <typename T>
inline int64_t place(int64_t i, int64_t width) {
  if (sizeof(T) == 4 || i >= width / kPair * kPair) return i;
  const int64_t j = i % kPair;
  return i - j + j / 2 + j % 2 * kLanes;
}

// e^x for x <= 0, within two units of the last place; NaN stays NaN.
inline Vec exp_nonpositive(Vec x) {
  const Vec low = Vec{} - 87.0f;
  const IntVec below = x < low;
  const Vec y = below ? low : x;
  const Vec shifter = Vec{} + 12582912.0f;
  const Vec n = (y * 1.44269504088896341f + shifter) - shifter;
  const Vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = Vec{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  const Vec zero = {};
  return below ? zero : p * scale;
}

struct Shape {
  int64_t page_size, num_kv_heads, groups, qk_dim, v_dim;
  int64_t window_left;  // negative: all
  int64_t num_runs, num_splits;
};

struct Run {
  int64_t row, num_new, num_context, first_page, start_page, split_base;
};

// Scores of R rows against C tokens.
template <int R, int C, typename T>
inline void scores(const float* q, const T* const* key, int64_t H, float* out) {
  Vec acc[R][C] = {};
  int64_t h = 0;
  for (; h + kPair <= H; h += kPair) {
    Vec a[C], b[C];
#pragma GCC unroll 8
    for (int t = 0; t < C; ++t) load_pair(key[t] + h, a[t], b[t]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec qa = load(q + r * H + h), qb = load(q + r * H + h + kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < C; ++t) acc[r][t] = acc[r][t] + qa * a[t] + qb * b[t];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int t = 0; t < C; ++t) {
      float rest = 0;
      for (int64_t i = h; i < H; ++i) rest += q[r * H + i] * one(key[t][i]);
      out[r * kBlock + t] = sum(acc[r][t]) + rest;
    }
}

template <int R, typename T>
inline void accumulate(const float* prob, const T* const* value, int count, int64_t V, float* acc,
                       const T* const* next_key, int next_count, int64_t H) {
  const int64_t share = V < kPair ? H : H * kPair / V;
  int64_t v = 0;
  for (; v + kPair <= V; v += kPair) {
    Vec a[R], b[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) a[r] = load(acc + r * V + v), b[r] = load(acc + r * V + v + kLanes);
    for (int t = 0; t < count; ++t) {
      Vec x, y;
      load_pair(value[t] + v, x, y);
      if (t < next_count) fetch(next_key[t] + v / kPair * share, share);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        a[r] += x * prob[r * kBlock + t];
        b[r] += y * prob[r * kBlock + t];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(acc + r * V + v, a[r]), store(acc + r * V + v + kLanes, b[r]);
  }
  for (; v < V; ++v)
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < count; ++t) acc[r * V + v] += prob[r * kBlock + t] * one(value[t][v]);
}

// R rows of one head against `count` tokens from t0 on; row r sees [first[r], last[r]]. State per row: acc[V], maximum, total.
template <int R, typename T>
inline void attend(const Shape& s, const float* q, const T* const* key, const T* const* value, int64_t t0, int count,
            const int64_t* first, const int64_t* last, float* acc, float* maximum, float* total, const T* const* next_key, const T* const* next_value, int next_count) {
  constexpr int C = R <= 2 ? 4 : R == 4 ? 2 : 1;
  alignas(64) float prob[R * kBlock];
  const Vec hidden = Vec{} - __builtin_inff();
  for (int r = 0; r < R; ++r) store(prob + r * kBlock, hidden);
  int t = 0;
  for (; t + C <= count; t += C) {
    for (int c = t; c < t + C && c < next_count; ++c) fetch(next_value[c], s.v_dim);
    scores<R, C>(q, key + t, s.qk_dim, prob + t);
  }
  for (; t < count; ++t) scores<R, 1>(q, key + t, s.qk_dim, prob + t);
  for (int r = 0; r < R; ++r) {
    float* p = prob + r * kBlock;
    float top = maximum[r];
    for (int t = 0; t < kBlock; ++t) {
      if (t0 + t < first[r] || t0 + t > last[r]) p[t] = -__builtin_inff();
      top = p[t] > top ? p[t] : top;
    }
    if (top == -__builtin_inff()) top = 0;  // nothing seen yet, or nothing but NaN
    const Vec e = exp_nonpositive(load(p) - top);
    store(p, e);
    if (top != maximum[r]) {
      const float factor = exp_nonpositive(Vec{} + (maximum[r] - top))[0];
      maximum[r] = top;
      total[r] *= factor;
      for (int64_t v = 0; v < s.v_dim; ++v) acc[r * s.v_dim + v] *= factor;
    }
    total[r] += sum(e);
  }
  accumulate<R>(prob, value, count, s.v_dim, acc, next_key, next_count, s.qk_dim);
}

template <typename T>
void run_split(const Shape& s, const Run& run, int64_t begin_at, const float* q_all, const T* keys, const T* values,
               const int64_t* pages, float scale, float* partial) {
  const int64_t K = s.num_kv_heads, G = s.groups, H = s.qk_dim, V = s.v_dim, rows = run.num_new * G;
  float *acc = partial, *maximum = acc + K * rows * V, *total = maximum + K * rows;
  std::vector<float> q(K * rows * H);
  std::vector<int64_t> first(rows), last(rows);
  const int64_t held = run.start_page * s.page_size;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t position = run.num_context + i / G;
    last[i] = position;
    first[i] = s.window_left < 0 ? 0 : position - s.window_left;
    if (first[i] < held) first[i] = held;
    for (int64_t head = 0; head < K; ++head) {
      const float* from = q_all + (((run.row + i / G) * K + head) * G + i % G) * H;
      for (int64_t h = 0; h < H; ++h) q[(head * rows + i) * H + place<T>(h, H)] = from[h] * scale;
      maximum[head * rows + i] = -__builtin_inff();
    }
  }
  const int64_t begin = first[0] + begin_at;
  const int64_t end = begin + kSplit < last[rows - 1] + 1 ? begin + kSplit : last[rows - 1] + 1;
  // Blocks are found one ahead, and fetched while the one before is computed: pages lie anywhere, so the processor
  // would not guess them.
  const T *key[2][kBlock], *value[2][kBlock];
  const auto find = [&](int64_t t0, int into) {
    const int count = int(end - t0 < kBlock ? (end > t0 ? end - t0 : 0) : kBlock);
    int64_t page = t0 / s.page_size, at = t0 % s.page_size;
    for (int t = 0; t < count; ++t) {
      const int64_t slot = pages[run.first_page + page - run.start_page] * s.page_size + at;
      key[into][t] = keys + slot * K * H;
      value[into][t] = values + slot * K * V;
      if (++at == s.page_size) at = 0, ++page;
    }
    return count;
  };
  int count = find(begin, 0), now = 0;
  for (int64_t t0 = begin; t0 < end; t0 += kBlock) {
    const int next_count = find(t0 + kBlock, 1 - now);
    for (int64_t head = 0; head < K; ++head) {
      const bool is_last = head + 1 == K;
      int ahead = is_last ? next_count : count;
      const T *next_key[kBlock], *next_value[kBlock];
      for (int t = 0; t < ahead; ++t) {
        next_key[t] = is_last ? key[1 - now][t] : key[now][t] + H;
        next_value[t] = is_last ? value[1 - now][t] : value[now][t] + V;
      }
      int64_t i = 0;
#define ATTEND(R)                                                                                              \
  for (; i + R <= rows; i += R, ahead = 0)                                                                         \
    attend<R>(s, q.data() + (head * rows + i) * H, key[now], value[now], t0, count, first.data() + i,            \
              last.data() + i, acc + (head * rows + i) * V, maximum + head * rows + i, total + head * rows + i,\
   next_key, next_value, ahead);
      ATTEND(8)
      ATTEND(4)
      ATTEND(2)
      ATTEND(1)
#undef ATTEND
      for (int t = 0; t < count; ++t) key[now][t] += H, value[now][t] += V;
    }
    now = 1 - now;
    count = next_count;
  }
}

template <typename T>
void run(const Shape& s, const float* q_all, float* out_all, const T* keys, const T* values, const int64_t* pages,
         const Run* runs, const float* sinks, float scale) {
  const int64_t num_runs = s.num_runs, num_splits = s.num_splits;
  const int64_t K = s.num_kv_heads, G = s.groups, V = s.v_dim, N = K * G;
  std::vector<int64_t> run_of(num_splits), offset(num_splits + 1);
  for (int64_t i = 0, split = 0; i < num_runs; ++i) {
    const int64_t stop = i + 1 < num_runs ? runs[i + 1].split_base : num_splits;
    for (; split < stop; ++split) {
      run_of[split] = i;
      offset[split + 1] = offset[split] + runs[i].num_new * N * (V + 2);
    }
  }
  std::vector<float> partial(offset[num_splits]);
#pragma omp parallel for schedule(dynamic)
  for (int64_t split = 0; split < num_splits; ++split) {
    const Run& r = runs[run_of[split]];
    run_split(s, r, (split - r.split_base) * kSplit, q_all, keys, values, pages, scale, partial.data() + offset[split]);
  }
  for (int64_t i = 0; i < num_runs; ++i) {
    const Run& r = runs[i];
    const int64_t rows = r.num_new * G;
    const int64_t stop = i + 1 < num_runs ? runs[i + 1].split_base : num_splits;
    for (int64_t head = 0; head < K; ++head) {
      for (int64_t j = 0; j < rows; ++j) {
        const int64_t n = head * G + j % G, state = head * rows + j;
        float* out = out_all + ((r.row + j / G) * N + n) * V;
        float top = sinks ? sinks[n] : -__builtin_inff();
        for (int64_t split = r.split_base; split < stop; ++split) {
          const float m = partial[offset[split] + K * rows * V + state];
          top = m > top ? m : top;
        }
        float total = sinks ? exp_nonpositive(Vec{} + (sinks[n] - top))[0] : 0.0f;
        std::memset(out, 0, V * sizeof(float));
        for (int64_t split = r.split_base; split < stop; ++split) {
          const float* base = partial.data() + offset[split];
          const float factor = exp_nonpositive(Vec{} + (base[K * rows * V + state] - top))[0];
          total += factor * base[K * rows * (V + 1) + state];
          for (int64_t v = 0; v < V; ++v) out[v] += factor * base[state * V + place<T>(v, V)];
        }
        for (int64_t v = 0; v < V; ++v) out[v] /= total;
      }
    }
  }
}

}  // namespace

extern "C" void mimo_paged_decode(int is_bf16, const Shape* s, const float* q, float* out, const void* keys,
                                  const void* values, const int64_t* pages, const Run* runs, const float* sinks,
                                  float scale) {
  if (is_bf16)
    run(*s, q, out, static_cast<const Bf16*>(keys), static_cast<const Bf16*>(values), pages, runs, sinks, scale);
  else
    run(*s, q, out, static_cast<const float*>(keys), static_cast<const float*>(values), pages, runs, sinks, scale);
}
