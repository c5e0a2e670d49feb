// What the kernels share: vectors by the compiler's own extension, bf16, and sums of vectors.

#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kPair = 2 * kLanes;

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));

struct Bf16 {
  uint16_t bits;
};

inline float one(float x) { return x; }
inline float one(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// To nearest, ties to even, as torch rounds.
inline void put(float x, float* at) { *at = x; }
inline void put(float x, Bf16* at) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  at->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Sums of P vectors, P a power of two of at most 16, each in the same order whatever P is: halves, then quarters, and
// so on. Two vectors become one in each step, so that 16 sums cost hardly more than one.
template <int P>
inline Vec sums(const Vec* x) {
  Vec a[16], b[16];
  const auto above = [](int count) { return count > 1 ? count / 2 : 1; };
  int count = P;
  const auto fold = [&](const Vec* from, Vec* to, auto step) {
    for (int i = 0; i < above(count); ++i) {
      const Vec one = from[2 * i < count ? 2 * i : 0], two = from[2 * i + 1 < count ? 2 * i + 1 : 0];
      to[i] = step(one, two);
    }
    count = above(count);
  };
  fold(x, a, [](Vec p, Vec q) {
    return __builtin_shufflevector(p, q, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(p, q, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  });
  fold(a, b, [](Vec p, Vec q) {
    return __builtin_shufflevector(p, q, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(p, q, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  });
  fold(b, a, [](Vec p, Vec q) {
    return __builtin_shufflevector(p, q, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           __builtin_shufflevector(p, q, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  });
  fold(a, b, [](Vec p, Vec q) {
    return __builtin_shufflevector(p, q, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(p, q, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  });
  return b[0];
}

constexpr int power_above(int x) { return x <= 1 ? 1 : 2 * power_above((x + 1) / 2); }

inline float sum(Vec x) { return sums<1>(&x)[0]; }

#ifdef __AVX512BF16__
inline __m512bh load_all(const Bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }
// The first `count` of a pair of vectors; the others are zero.
inline __m512bh load_some(const Bf16* at, int count) {
  return (__m512bh)_mm512_maskz_loadu_epi16((uint32_t(1) << count) - 1, at);
}
inline Vec add_product(Vec acc, __m512bh x, __m512bh w) { return (Vec)_mm512_dpbf16_ps((__m512)acc, x, w); }
#endif

}  // namespace
