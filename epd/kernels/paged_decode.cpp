// Attention of a few queries per sequence over paged keys and values: reads every visible key and value once, where it
// lies, and keeps a running softmax in fp32. Plain C++ with the compiler's own vectors, without torch's headers.
//
// Letters: N query heads; K KV heads; G query heads per KV head; H key width; V value width. A run is one sequence; its
// rows are its new tokens times G, for each KV head. The work is cut into splits of kSplit tokens of a run, each
// with a state (sums of values, maximum and total per row) of its own, which are joined at the end.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBlock = 16;       // tokens whose scores are held at a time
constexpr int64_t kSplit = 256;  // tokens per task: fixed, so that sums do not depend on batch or threads

typedef int32_t IntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
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
// Elements in order, where fewer are left than a pair of vectors holds.
inline Vec load(const Bf16* at) {
  typedef uint16_t Half __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
  const Bits wide = __builtin_convertvector(*reinterpret_cast<const Half*>(at), Bits);
  return reinterpret_cast<Vec>(wide << 16);
}
template <typename T>
inline void fetch(const T* at, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(at + i, 0, 2);
}

inline float largest(Vec x) {
  const auto larger = [](Vec a, Vec b) { return a > b ? a : b; };
  x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
  x = larger(x, __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
  return x[0] > x[1] ? x[0] : x[1];
}

// Brings `width` numbers, times a factor, into the order in which load_pair gives elements of type T, or out of it.
template <typename T, bool is_back, typename From, typename To>
inline void reorder(const From* from, To* to, int64_t width, float factor) {
  const int64_t paired = sizeof(T) == 4 ? 0 : width / kPair * kPair;
  for (int64_t i = 0; i < paired; i += kPair)
    for (int j = 0; j < kLanes; ++j)
      for (int odd = 0; odd < 2; ++odd) {
        const int64_t straight = i + 2 * j + odd, split = i + j + odd * kLanes;
        put(one(from[is_back ? split : straight]) * factor, to + (is_back ? straight : split));
      }
  for (int64_t i = paired; i < width; ++i) put(one(from[i]) * factor, to + i);
}

// How queries are held: as they come where the processor multiplies bf16 by bf16, else as floats, reordered.
#ifdef __AVX512BF16__
template <typename T, typename Q>
using Held = std::conditional_t<sizeof(T) == 2 && sizeof(Q) == 2, Bf16, float>;
#else
template <typename T, typename Q>
using Held = float;
#endif

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

// As `_Shape` in paged_native.py.
struct Shape {
  int64_t page_size, num_kv_heads, groups, qk_dim, v_dim;
  int64_t window_left;  // negative: all
  int64_t num_runs, num_splits;
  float scale;
};

// As `DecodeRuns.table`: the first token among the queries; new tokens and those before them; the place in `pages` of
// the page of logical number start_page; and the run's first split.
struct Run {
  int64_t row, num_new, num_context, first_page, start_page, split_base;
};

// Scores of R rows against C tokens.
template <int R, int C, typename T>
inline void scores(const float* q, const T* const* key, int64_t H, float scale, float* out) {
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
  if (h + kLanes <= H) {
#pragma GCC unroll 8
    for (int t = 0; t < C; ++t) {
      const Vec a = load(key[t] + h);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][t] += load(q + r * H + h) * a;
    }
    h += kLanes;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int t = 0; t < C; ++t) {
      float rest = 0;
      for (int64_t i = h; i < H; ++i) rest += q[r * H + i] * one(key[t][i]);
      out[r * kBlock + t] = scale * (sum(acc[r][t]) + rest);
    }
}

#ifdef __AVX512BF16__
// Products of bf16 are exact in fp32: nothing is lost against the above.
template <int R, int C>
inline void scores(const Bf16* q, const Bf16* const* key, int64_t H, float scale, float* out) {
  constexpr int P = power_above(R * C);
  Vec acc[P] = {};
  const auto step = [&](int64_t h, auto load) {
    __m512bh keys[C];
#pragma GCC unroll 8
    for (int t = 0; t < C; ++t) keys[t] = load(key[t] + h);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh row = load(q + r * H + h);
#pragma GCC unroll 8
      for (int t = 0; t < C; ++t) acc[r * C + t] = add_product(acc[r * C + t], row, keys[t]);
    }
  };
  int64_t h = 0;
  for (; h + kPair <= H; h += kPair) step(h, [](const Bf16* at) { return load_all(at); });
  if (h < H) step(h, [&](const Bf16* at) { return load_some(at, int(H - h)); });
  const Vec total = sums<P>(acc) * scale;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int t = 0; t < C; ++t) out[r * kBlock + t] = total[r * C + t];
}
#endif

// Adds the values of `count` tokens, weighted, to R rows' sums.
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

// R rows of one head against `count` tokens from t0 on, of which row r sees [first[r], last[r]]. Meanwhile the next
// keys and values are fetched in small pieces: all at once they would be waited for.
template <int R, typename T, typename Q>
inline void attend(const Shape& s, const Q* q, const T* const* key, const T* const* value, int64_t t0, int count,
                   const int64_t* first, const int64_t* last, float* acc, float* maximum, float* total,
                   const T* const* next_key, const T* const* next_value, int next_count) {
  constexpr int C = R <= 2 ? 4 : R <= 6 ? 2 : 1;
  alignas(64) float prob[R * kBlock];
  const Vec hidden = Vec{} - kInfinity;
  for (int r = 0; r < R; ++r) store(prob + r * kBlock, hidden);
  int t = 0;
  for (; t + C <= count; t += C) {
    for (int c = t; c < t + C && c < next_count; ++c) fetch(next_value[c], s.v_dim);
    scores<R, C>(q, key + t, s.qk_dim, s.scale, prob + t);
  }
  for (; t < count; ++t) scores<R, 1>(q, key + t, s.qk_dim, s.scale, prob + t);
  for (int r = 0; r < R; ++r) {
    float* p = prob + r * kBlock;
    if (t0 < first[r] || t0 + count - 1 > last[r])
      for (int i = 0; i < count; ++i)
        if (t0 + i < first[r] || t0 + i > last[r]) p[i] = -kInfinity;
    const float here = largest(load(p));
    const float top = here > maximum[r] ? here : maximum[r];
    // A row that has seen nothing yet stays at minus infinity, and all its weights are zero.
    const Vec e = exp_nonpositive(load(p) - (top == -kInfinity ? 0.0f : top));
    store(p, e);
    if (top > maximum[r]) {
      const float factor = exp_nonpositive(Vec{} + (maximum[r] - top))[0];
      maximum[r] = top;
      total[r] *= factor;
      for (int64_t v = 0; v < s.v_dim; ++v) acc[r * s.v_dim + v] *= factor;
    }
    total[r] += sum(e);
  }
  accumulate<R>(prob, value, count, s.v_dim, acc, next_key, next_count, s.qk_dim);
}

// One split, into a state of K x rows x V sums, K x rows maxima and K x rows totals. q is [K, rows, H], as `Held` says.
template <typename T, typename Q>
void run_split(const Shape& s, const Run& run, int64_t skip, const Q* q, const T* keys, const T* values,
               const int64_t* pages, float* state) {
  const int64_t K = s.num_kv_heads, H = s.qk_dim, V = s.v_dim, rows = run.num_new * s.groups;
  float *acc = state, *maximum = acc + K * rows * V, *total = maximum + K * rows;
  for (int64_t i = 0; i < K * rows; ++i) maximum[i] = -kInfinity;
  std::vector<int64_t> first(rows), last(rows);
  const int64_t held = run.start_page * s.page_size;
  for (int64_t i = 0; i < rows; ++i) {
    last[i] = run.num_context + i / s.groups;
    first[i] = s.window_left < 0 ? 0 : last[i] - s.window_left;
    if (first[i] < held) first[i] = held;
  }
  const int64_t begin = first[0] + skip;
  const int64_t end = begin + kSplit < last[rows - 1] + 1 ? begin + kSplit : last[rows - 1] + 1;
  // Blocks are found one ahead, to be fetched while this one is computed: pages lie anywhere, so the processor would
  // not guess them.
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
      const auto some_rows = [&](auto number) {
        for (; i + number <= rows; i += number, ahead = 0) {
          const int64_t row = head * rows + i;
          attend<number>(s, q + row * H, key[now], value[now], t0, count, &first[i], &last[i], acc + row * V,
                         maximum + row, total + row, next_key, next_value, ahead);
        }
      };
      some_rows(std::integral_constant<int, 8>());
      some_rows(std::integral_constant<int, 6>());
      some_rows(std::integral_constant<int, 4>());
      some_rows(std::integral_constant<int, 3>());
      some_rows(std::integral_constant<int, 2>());
      some_rows(std::integral_constant<int, 1>());
      for (int t = 0; t < count; ++t) key[now][t] += H, value[now][t] += V;
    }
    now = 1 - now;
    count = next_count;
  }
}

// Joins the states of a run's splits, `size` apart, into rows of `out`.
template <typename T, typename Q>
void join(const Shape& s, const Run& run, const float* states, int64_t size, int64_t num_splits, const float* sinks,
          Q* out) {
  const int64_t K = s.num_kv_heads, V = s.v_dim, rows = run.num_new * s.groups;
  std::vector<float> sums(V);
  for (int64_t row = 0; row < K * rows; ++row) {
    const int64_t n = row / rows * s.groups + row % s.groups, token = run.row + row % rows / s.groups;
    float top = sinks ? sinks[n] : -kInfinity;
    for (int64_t i = 0; i < num_splits; ++i) {
      const float m = states[i * size + K * rows * V + row];
      top = m > top ? m : top;
    }
    float total = sinks ? exp_nonpositive(Vec{} + (sinks[n] - top))[0] : 0.0f;
    sums.assign(V, 0.0f);
    for (int64_t i = 0; i < num_splits; ++i) {
      const float* state = states + i * size;
      const float factor = exp_nonpositive(Vec{} + (state[K * rows * V + row] - top))[0];
      total += factor * state[K * rows * (V + 1) + row];
      for (int64_t v = 0; v < V; ++v) sums[v] += factor * state[row * V + v];
    }
    reorder<T, true>(sums.data(), out + (token * K * s.groups + n) * V, V, 1.0f / total);
  }
}

template <typename T, typename Q>
void attend_all(const Shape& s, const Q* q, Q* out, const T* keys, const T* values, const int64_t* pages,
                const Run* runs, const float* sinks) {
  typedef Held<T, Q> HeldQ;
  const int64_t K = s.num_kv_heads, G = s.groups, N = K * G, H = s.qk_dim;
  std::vector<int64_t> run_of(s.num_splits), state_at(s.num_splits + 1), q_at(s.num_runs + 1);
  for (int64_t i = 0, split = 0; i < s.num_runs; ++i) {
    const int64_t stop = i + 1 < s.num_runs ? runs[i + 1].split_base : s.num_splits;
    for (; split < stop; ++split) {
      run_of[split] = i;
      state_at[split + 1] = state_at[split] + runs[i].num_new * N * (s.v_dim + 2);
    }
    q_at[i + 1] = q_at[i] + runs[i].num_new * N * H;
  }
  std::vector<HeldQ> ordered(q_at[s.num_runs]);
  std::vector<float> states(state_at[s.num_splits]);
  for (int64_t i = 0; i < s.num_runs; ++i) {
    const int64_t rows = runs[i].num_new * G;
    for (int64_t row = 0; row < K * rows; ++row) {
      const int64_t token = runs[i].row + row % rows / G, n = row / rows * G + row % G;
      const Q* from = q + (token * N + n) * H;
      HeldQ* to = &ordered[q_at[i] + row * H];
      if constexpr (sizeof(HeldQ) == 4)
        reorder<T, false>(from, to, H, 1.0f);
      else
        std::copy(from, from + H, to);
    }
  }
#pragma omp parallel for schedule(dynamic)
  for (int64_t split = 0; split < s.num_splits; ++split) {
    const Run& run = runs[run_of[split]];
    run_split(s, run, (split - run.split_base) * kSplit, &ordered[q_at[run_of[split]]], keys, values, pages,
              &states[state_at[split]]);
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < s.num_runs; ++i) {
    const int64_t stop = i + 1 < s.num_runs ? runs[i + 1].split_base : s.num_splits, base = runs[i].split_base;
    join<T>(s, runs[i], &states[state_at[base]], state_at[base + 1] - state_at[base], stop - base, sinks, out);
  }
}

template <typename T, typename Q>
void attend_any(const Shape* s, const void* q, void* out, const void* keys, const void* values, const int64_t* pages,
                const Run* runs, const float* sinks) {
  attend_all(*s, static_cast<const Q*>(q), static_cast<Q*>(out), static_cast<const T*>(keys),
             static_cast<const T*>(values), pages, runs, sinks);
}

}  // namespace

extern "C" void mimo_paged_decode(int are_pages_bf16, int are_rows_bf16, const Shape* s, const void* q, void* out,
                                  const void* keys, const void* values, const int64_t* pages, const Run* runs,
                                  const float* sinks) {
  const auto run = are_pages_bf16 ? (are_rows_bf16 ? attend_any<Bf16, Bf16> : attend_any<Bf16, float>)
                                  : (are_rows_bf16 ? attend_any<float, Bf16> : attend_any<float, float>);
  run(s, q, out, keys, values, pages, runs, sinks);
}
