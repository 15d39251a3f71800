// Vectors of 16 numbers in GCC's notation, which any processor can run, and the few steps that need its own words.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define BLOCK 32  // numbers that share a scale
#define INLINE static inline __attribute__((always_inline))

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef uint8_t v64b __attribute__((vector_size(64)));

#define AT(type, place)                         \
    ({                                          \
        type value_;                            \
        memcpy(&value_, (place), sizeof value_); \
        value_;                                 \
    })
#define PUT(place, vector)                     \
    do {                                       \
        __auto_type value_ = (vector);         \
        memcpy((place), &value_, sizeof value_); \
    } while (0)

INLINE v16f splat(float x) { return x - (v16f){0}; }
INLINE v16f to_float(v16i x) { return __builtin_convertvector(x, v16f); }
INLINE v16f choose(v16i is_first, v16f a, v16f b) { return (v16f)((is_first & (v16i)a) | (~is_first & (v16i)b)); }
INLINE v16f larger(v16f a, v16f b) { return choose(a > b, a, b); }

INLINE float sum_of(v16f x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

INLINE v16f sums_of_pairs(v16f a, v16f b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else  // GCC has the other only from version 12 on
    v16i even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
#endif
}

// The sum of each of 16 vectors; they are overwritten.
INLINE v16f sums_of(v16f *x) {
    for (int count = LANES / 2; count; count /= 2)
        for (int i = 0; i < count; i++) x[i] = sums_of_pairs(x[2 * i], x[2 * i + 1]);
    return x[0];
}

INLINE float max_of(v16f x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// 4 products of unsigned and signed bytes summed into each lane; `x` is the same 4 signed bytes for all lanes.
// `is_small`: w is below 16, so that pairs of products fit 16 bits.
INLINE v16i dot4(v16i sum, v64b w, int32_t x, int is_small) {
    (void)is_small;
#if defined(__AVX512VNNI__)
    return (v16i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    __m256i half[2], ones = _mm256_set1_epi16(1), signs = _mm256_set1_epi8(-128);
    memcpy(half, &w, 64);
    for (int i = 0; i < 2; i++) {
        __m256i right = _mm256_set1_epi32(x), product;
        if (is_small) {
            product = _mm256_maddubs_epi16(half[i], right);
        } else {  // (w - 128) * x, of which pairs fit, then the 128 * x again
            __m256i left = _mm256_xor_si256(half[i], signs);
            product = _mm256_maddubs_epi16(_mm256_abs_epi8(left), _mm256_sign_epi8(right, left));
        }
        half[i] = _mm256_madd_epi16(product, ones);
    }
    v16i products;
    memcpy(&products, half, 64);
    if (!is_small) products += 128 * ((int8_t)x + (int8_t)(x >> 8) + (int8_t)(x >> 16) + (int8_t)(x >> 24));
    return sum + products;
#else

    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) sum[i] += (int32_t)w[4 * i + j] * (int8_t)(x >> (8 * j));
    return sum;
#endif
}

INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = sign | ((rest << 13) + (112u << 23));
    else {
        float small = (float)rest * 0x1p-24f;
        return sign ? -small : small;
    }
    return AT(float, &bits);
#endif
}

// Rounds to nearest; what is too large becomes the largest, and what is too small is lost as in any conversion.
INLINE uint16_t float_to_half(float x) {
    x = x > 65504 ? 65504 : x < -65504 ? -65504 : x;
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    uint32_t bits = AT(uint32_t, &x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest < 113u << 23) return (uint16_t)(sign | (uint32_t)rintf(fabsf(x) * 0x1p24f));
    return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13));
#endif
}

INLINE v16f halves(const uint8_t *place) {
#if defined(__AVX512F__)
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)place));
#else
    v16h from = AT(v16h, place);
    v16f to;
    for (int i = 0; i < LANES; i++) to[i] = half_to_float(from[i]);
    return to;
#endif
}

INLINE v16f bfloats(const uint16_t *place) {
#if defined(__AVX512F__)
    v16u wide = (v16u)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)place));
#else
    v16u wide = __builtin_convertvector(AT(v16h, place), v16u);
#endif
    return (v16f)(wide << 16);
}

INLINE uint16_t to_bfloat(float x) {
    uint32_t bits = AT(uint32_t, &x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// e to the power x, for x of at most 0; relative error below 2e-7 (a polynomial on [-ln 2 / 2, ln 2 / 2]).
INLINE v16f exp_of(v16f x) {
    x = larger(x, splat(-87.0f));
    v16f whole = x * 1.44269504f + 12582912.0f;
    v16i power = (v16i)whole - 0x4b400000;
    whole -= 12582912.0f;
    v16f r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    v16f y = splat(1.9875691500e-4f) * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (v16f)((v16i)y + (power << 23));
}
