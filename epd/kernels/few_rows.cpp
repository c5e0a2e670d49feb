// Matrix products of a few rows: each weight is read once, where it lies, and no copy of it is made in another order.
// Plain C++ with the compiler's own vectors; bf16 dot products of the processor where it has them.
//
// Letters: M rows; N outputs; K inputs; T tokens; A experts per token; E experts; D hidden width; I inner width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kRows = 8;        // rows of x that share a weight in registers
constexpr int64_t kBlock = 64;  // outputs per task: long runs of memory, and work for many threads
// Bytes: by measurement, 8 to 16 KiB ahead into the second cache reads more than twice as fast as no fetching at all.
constexpr int64_t kAhead = 12288;

template <typename T>
inline float rounded(float x) {
  T narrow;
  put(x, &narrow);
  return one(narrow);
}

// 32 elements at a time, added to 16 partial sums.
struct Wide {
  Vec a, b;
};
inline Wide load(const float* at) {
  return {*reinterpret_cast<const Vec*>(at), *reinterpret_cast<const Vec*>(at + kLanes)};
}
inline Vec add_product(Vec acc, const Wide& x, const Wide& w) { return acc + x.a * w.a + x.b * w.b; }
#ifdef __AVX512BF16__
inline __m512bh load(const Bf16* at) { return load_all(at); }
#else
// The even and the odd elements, of x as of w.
inline Wide load(const Bf16* at) {
  const Bits both = *reinterpret_cast<const Bits*>(at);
  return {reinterpret_cast<Vec>(both << 16), reinterpret_cast<Vec>(both & 0xffff0000u)};
}
#endif

// out[r * N + n] = x[r] . w[n], in an order that depends on K alone. What comes kAhead bytes later is fetched meanwhile:
// tiles follow each other front to back.
template <int R, int N, typename T>
inline void tile(const T* const* x, const T* w, int64_t K, float* out) {
  constexpr int P = power_above(R * N);
  Vec acc[P] = {};
  int64_t k = 0;
  for (; k + kPair <= K; k += kPair) {
    decltype(load(w)) weight[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      weight[n] = load(w + n * K + k);
      for (int64_t line = 0; line < int64_t(kPair * sizeof(T)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(w + n * K + k) + kAhead + line, 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto row = load(x[r] + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r * N + n] = add_product(acc[r * N + n], row, weight[n]);
    }
  }
  const Vec total = sums<P>(acc);
#pragma GCC unroll 16
  for (int i = 0; i < R * N; ++i) out[i] = total[i];
  if (k < K)
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) {
        float rest = 0;
        for (int64_t i = k; i < K; ++i) rest += one(x[r][i]) * one(w[n * K + i]);
        out[r * N + n] += rest;
      }
}

// take(row, output, value) for R rows against the weights [first, stop) of w [.., K]. As many outputs at a time as there
// are registers for: each row is then loaded once for all of them.
template <int R, typename T, typename Take>
inline void rows_product(const T* const* x, int64_t row, const T* w, int64_t first, int64_t stop, int64_t K,
                         Take take) {
  constexpr int N = R <= 4 ? 4 : 2;
  float out[R * N];
  int64_t n = first;
  for (; n + N <= stop; n += N) {
    tile<R, N>(x + row, w + n * K, K, out);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < N; ++j) take(row + r, n + j, out[r * N + j]);
  }
  for (; n < stop; ++n) {
    tile<R, 1>(x + row, w + n * K, K, out);
    for (int r = 0; r < R; ++r) take(row + r, n, out[r]);
  }
}

// The same for any number of rows.
template <typename T, typename Take>
inline void product(const T* const* x, int64_t rows, const T* w, int64_t first, int64_t stop, int64_t K, Take take) {
  for (int64_t r = 0; r < rows; r += kRows) switch (std::min<int64_t>(kRows, rows - r)) {
      case 1: rows_product<1>(x, r, w, first, stop, K, take); break;
      case 2: rows_product<2>(x, r, w, first, stop, K, take); break;
      case 3: rows_product<3>(x, r, w, first, stop, K, take); break;
      case 4: rows_product<4>(x, r, w, first, stop, K, take); break;
      case 5: rows_product<5>(x, r, w, first, stop, K, take); break;
      case 6: rows_product<6>(x, r, w, first, stop, K, take); break;
      case 7: rows_product<7>(x, r, w, first, stop, K, take); break;
      default: rows_product<kRows>(x, r, w, first, stop, K, take);
    }
}

template <typename T>
void linear(int64_t M, int64_t N, int64_t K, const T* x, const T* w, T* out) {
  std::vector<const T*> rows(M);
  for (int64_t m = 0; m < M; ++m) rows[m] = x + m * K;
  const int64_t tasks = (N + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < tasks; ++task)
    product(rows.data(), M, w, task * kBlock, std::min(N, (task + 1) * kBlock), K,
            [&](int64_t m, int64_t n, float value) { put(value, out + m * N + n); });
}

struct Group {
  int64_t expert, first, count;  // of the sorted pairs of token and expert
};

template <typename T>
void experts(int64_t tokens, int64_t A, int64_t E, int64_t D, int64_t I, const T* x, const int64_t* choice,
             const float* share, const T* gate_up, const T* down, T* out) {
  const int64_t pairs = tokens * A;
  std::vector<int64_t> order(pairs), starts(E + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) ++starts[choice[i] + 1];
  std::vector<Group> groups;
  for (int64_t e = 0; e < E; ++e) {
    if (starts[e + 1]) groups.push_back({e, starts[e], starts[e + 1]});
    starts[e + 1] += starts[e];
  }
  for (int64_t i = 0; i < pairs; ++i) order[starts[choice[i]]++] = i;
  std::vector<const T*> rows(pairs), inner_rows(pairs);
  std::vector<T> inner(pairs * I);
  for (int64_t j = 0; j < pairs; ++j) {
    rows[j] = x + order[j] / A * D;
    inner_rows[j] = inner.data() + j * I;
  }
  const int64_t inner_blocks = (I + kBlock - 1) / kBlock, blocks = (D + kBlock - 1) / kBlock;
  const int64_t tasks = int64_t(groups.size()) * inner_blocks;
#pragma omp parallel
  {
    std::vector<float> gates(pairs * kBlock), parts(pairs * kBlock);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const Group& group = groups[task / inner_blocks];
      const int64_t first = task % inner_blocks * kBlock, stop = std::min(I, first + kBlock);
      const T* w = gate_up + group.expert * 2 * I * D;
      product(rows.data() + group.first, group.count, w, first, stop, D,
              [&](int64_t r, int64_t i, float value) { gates[r * kBlock + i - first] = rounded<T>(value); });
      product(rows.data() + group.first, group.count, w + I * D, first, stop, D,
              [&](int64_t r, int64_t i, float value) {
                const float gate = gates[r * kBlock + i - first];
                const float active = rounded<T>(gate / (1.0f + std::exp(-gate)));
                put(active * rounded<T>(value), inner.data() + (group.first + r) * I + i);
              });
    }
#pragma omp for schedule(dynamic)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * kBlock, stop = std::min(D, first + kBlock);
      for (const Group& group : groups)
        product(inner_rows.data() + group.first, group.count, down + group.expert * D * I, first, stop, I,
                [&](int64_t r, int64_t d, float value) {
                  parts[order[group.first + r] * kBlock + d - first] = rounded<T>(value);
                });
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t d = first; d < stop; ++d) {
          float total = 0;
          for (int64_t a = 0; a < A; ++a) total += share[t * A + a] * parts[(t * A + a) * kBlock + d - first];
          put(total, out + t * D + d);
        }
    }
  }
}

// Root-mean-square norm of each row, rounded, then times the weight, rounded again.
template <typename T>
void norm(int64_t M, int64_t D, const T* x, const T* w, float eps, T* out) {
  for (int64_t m = 0; m < M; ++m, x += D, out += D) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + kLanes <= D; i += kLanes)
      for (int j = 0; j < kLanes; ++j) squares[j] += one(x[i + j]) * one(x[i + j]);
    float rest = 0;
    for (; i < D; ++i) rest += one(x[i]) * one(x[i]);
    const float factor = 1.0f / std::sqrt((sums<1>(&squares)[0] + rest) / float(D) + eps);
    for (i = 0; i < D; ++i) put(rounded<T>(one(x[i]) * factor) * one(w[i]), out + i);
  }
}

// Queries, keys and values out of rows of one projection: the first 2 * half channels of queries and keys rotated,
// channel j with j + half; values times `scale`.
struct Split {
  int64_t rows, num_heads, num_kv_heads, qk_dim, v_dim, half;
};

template <typename T>
void turn(const Split& s, const T* x, const float* cos, const float* sin, float scale, T* q, T* k, T* v) {
  const int64_t H = s.qk_dim, num_values = s.num_kv_heads * s.v_dim;
  for (int64_t m = 0; m < s.rows; ++m, cos += s.half, sin += s.half) {
    for (int64_t n = 0; n < s.num_heads + s.num_kv_heads; ++n, x += H) {
      T*& to = n < s.num_heads ? q : k;
      for (int64_t i = 0; i < s.half; ++i) {
        const float low = one(x[i]), high = one(x[s.half + i]);
        put(low * cos[i] - high * sin[i], to + i);
        put(high * cos[i] + low * sin[i], to + s.half + i);
      }
      std::copy(x + 2 * s.half, x + H, to + 2 * s.half);
      to += H;
    }
    for (int64_t i = 0; i < num_values; ++i) put(one(x[i]) * scale, v + i);
    x += num_values;
    v += num_values;
  }
}

// Each token's A best experts by score and bias, the best first, and their weights by score alone.
struct Routing {
  int64_t tokens, A, E, D;
  int32_t is_rounded, is_normed;  // operands to bf16; weights by their sum
  float scale;
};

template <typename T>
void route(const Routing& g, const T* x, const float* w, const float* bias, int64_t* choice, float* weight) {
  std::vector<float> rows(g.tokens * g.D), rounded_w, scores(g.tokens * g.E), ranks(g.E);
  const auto operand = [&](float value) { return g.is_rounded ? rounded<Bf16>(value) : value; };
  for (int64_t i = 0; i < g.tokens * g.D; ++i) rows[i] = operand(one(x[i]));
  if (g.is_rounded) {
    rounded_w.resize(g.E * g.D);
    for (int64_t i = 0; i < g.E * g.D; ++i) rounded_w[i] = operand(w[i]);
    w = rounded_w.data();
  }
  std::vector<const float*> row_at(g.tokens);
  for (int64_t t = 0; t < g.tokens; ++t) row_at[t] = &rows[t * g.D];
  product(row_at.data(), g.tokens, w, 0, g.E, g.D,
          [&](int64_t t, int64_t e, float value) { scores[t * g.E + e] = 1.0f / (1.0f + std::exp(-value)); });
  for (int64_t t = 0; t < g.tokens; ++t, choice += g.A, weight += g.A) {
    const float* score = &scores[t * g.E];
    for (int64_t e = 0; e < g.E; ++e) ranks[e] = score[e] + bias[e];
    float total = 0;
    for (int64_t a = 0; a < g.A; ++a) {
      int64_t best = -1;
      for (int64_t e = 0; e < g.E; ++e) {
        const bool is_taken = std::find(choice, choice + a, e) != choice + a;
        // What is not a number must still be some expert.
        if (!is_taken && (best < 0 || ranks[e] > ranks[best])) best = e;
      }
      choice[a] = best;
      weight[a] = score[best];
      total += score[best];
    }
    for (int64_t a = 0; a < g.A; ++a) weight[a] = (g.is_normed ? weight[a] / (total + 1e-20f) : weight[a]) * g.scale;
  }
}

}  // namespace

extern "C" void mimo_few_linear(int is_bf16, int64_t M, int64_t N, int64_t K, const void* x, const void* w, void* out) {
  if (is_bf16)
    linear(M, N, K, static_cast<const Bf16*>(x), static_cast<const Bf16*>(w), static_cast<Bf16*>(out));
  else
    linear(M, N, K, static_cast<const float*>(x), static_cast<const float*>(w), static_cast<float*>(out));
}

extern "C" void mimo_few_experts(int is_bf16, int64_t tokens, int64_t A, int64_t E, int64_t D, int64_t I,
                                 const void* x, const int64_t* choice, const float* share, const void* gate_up,
                                 const void* down, void* out) {
  if (is_bf16)
    experts(tokens, A, E, D, I, static_cast<const Bf16*>(x), choice, share, static_cast<const Bf16*>(gate_up),
            static_cast<const Bf16*>(down), static_cast<Bf16*>(out));
  else
    experts(tokens, A, E, D, I, static_cast<const float*>(x), choice, share, static_cast<const float*>(gate_up),
            static_cast<const float*>(down), static_cast<float*>(out));
}

extern "C" void mimo_few_norm(int is_bf16, int64_t M, int64_t D, float eps, const void* x, const void* w, void* out) {
  if (is_bf16)
    norm(M, D, static_cast<const Bf16*>(x), static_cast<const Bf16*>(w), eps, static_cast<Bf16*>(out));
  else
    norm(M, D, static_cast<const float*>(x), static_cast<const float*>(w), eps, static_cast<float*>(out));
}

extern "C" void mimo_few_turn(int is_bf16, const Split* s, float scale, const void* x, const float* cos,
                              const float* sin, void* q, void* k, void* v) {
  if (is_bf16)
    turn(*s, static_cast<const Bf16*>(x), cos, sin, scale, static_cast<Bf16*>(q), static_cast<Bf16*>(k),
         static_cast<Bf16*>(v));
  else
    turn(*s, static_cast<const float*>(x), cos, sin, scale, static_cast<float*>(q), static_cast<float*>(k),
         static_cast<float*>(v));
}

extern "C" void mimo_few_route(int is_bf16, const Routing* g, const void* x, const float* w, const float* bias,
                               int64_t* choice, float* weight) {
  if (is_bf16)
    route(*g, static_cast<const Bf16*>(x), w, bias, choice, weight);
  else
    route(*g, static_cast<const float*>(x), w, bias, choice, weight);
}
