/* Products with packed weights: w = (code - zero) * scale, codes of 2, 3, 4 or 8 bits in a little-endian bit stream per row.

   multiply:    y[t][o] = sum_i w[o][i] * x[t][i], the weights live in registers only; up to 8 rows of x at once
   dequantize:  the float matrix, in float32 or bfloat16

   Vectors have 16 or 8 weights. So inputs and group sizes are multiples of 16, which the caller sees to.
   Sums are per row and do not depend on the number of threads. */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16 /* weights in a vector */
#else
#define LANES 8
#endif
#define RUN 128    /* inputs that one partial sum takes: short chains of additions overlap */
#define BLOCK 256  /* groups whose scales and zeros are made floats at once */
#define MOST 8

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));

typedef struct {
    const uint8_t *packed; /* rows of `stride` bytes */
    const void *scales;    /* (outputs, groups) */
    const uint8_t *zeros;  /* (outputs, groups) */
    int64_t outputs, inputs, group, groups, stride;
    int32_t kind; /* of the scales: 0 float32, 1 bfloat16, 2 float16 */
} Weight;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Scales and zeros of `count` groups from `at` on, as floats. */
static inline void read_grid(const Weight *w, int64_t at, int64_t count, float *scale, float *zero) {
    const uint16_t *half = (const uint16_t *)w->scales + at;
    for (int64_t i = 0; i < count; i++) zero[i] = w->zeros[at + i];
    if (w->kind == 0)
        memcpy(scale, (const float *)w->scales + at, 4 * count);
    else if (w->kind == 1)
        for (int64_t i = 0; i < count; i++) scale[i] = as_float((uint32_t)half[i] << 16);
    else /* finite: shift all but the sign, and mend the bias of the exponent */
        for (int64_t i = 0; i < count; i++) {
            const uint32_t sign = half[i] & 0x8000u, rest = half[i] & 0x7fffu;
            scale[i] = as_float(sign << 16 | rest << 13) * 0x1p112f;
        }
}

/* code - zero of LANES weights, exact. What it needs of the zero is `grid`: with AVX-512 the 16 levels of small codes
   as a table, else the zero itself. */
#ifdef __AVX512F__

static const words steps[5] = {
    [2] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
    [3] = {0, 3, 6, 9, 12, 15, 18, 21, 8, 11, 14, 17, 20, 23, 26, 29}, /* the second word starts a byte early */
    [4] = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28},
};

static inline floats grid_of(float zero, const int bits) {
    const ints code = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (bits == 8) return (floats){0} + zero;
    return __builtin_convertvector(code & ((1 << bits) - 1), floats) - zero;
}

static inline floats levels_at(const uint8_t *p, const int bits, floats grid) {
    if (bits == 8) return (floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))) - grid;
    __m512i code = _mm512_set1_epi32((int)word_at(p));
    if (bits > 2) code = _mm512_mask_set1_epi32(code, 0xff00, (int)word_at(p + 2 * bits - 4));
    /* what lies above the low bits of a lane is not looked at: the table repeats */
    return (floats)_mm512_permutexvar_ps((__m512i)((words)code >> steps[bits]), (__m512)grid);
}

#else

static inline floats grid_of(float zero, const int bits) {
    (void)bits;
    return (floats){0} + zero;
}

static inline floats levels_at(const uint8_t *p, const int bits, floats grid) {
    ints code;
    if (bits == 8) {
#ifdef __AVX2__
        code = (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
        for (int i = 0; i < LANES; i++) code[i] = p[i];
#endif
    } else {
        const words step = {0, 1, 2, 3, 4, 5, 6, 7};
        const uint32_t both = p[0] | (uint32_t)p[1] << 8;
        const uint32_t word = bits == 4 ? word_at(p) : bits == 3 ? both | (uint32_t)p[2] << 16 : both;
        code = (ints)((((words){0} + word) >> (step * (uint32_t)bits)) & ((1u << bits) - 1));
    }
    return __builtin_convertvector(code, floats) - grid;
}

#endif

/* a * b + c, rounded once where the CPU can: left to itself, the compiler fuses in one loop and not in another. */
static inline floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Pairs of pairs: one after the other would take as long as a row of a small layer. */
static inline float sum_of(floats v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}

#define ROW static inline __attribute__((always_inline)) void

ROW multiply_row(const Weight *w, int64_t row, const float *x, float *y, const int bits, const int count) {
    const int64_t inputs = w->inputs, groups = w->groups, group = w->group;
    const uint8_t *p = w->packed + row * w->stride;
    float scale[BLOCK], zero[BLOCK];
    floats total[MOST];
    for (int t = 0; t < count; t++) total[t] = (floats){0};
    for (int64_t g = 0; g < groups; g++) {
        if (g % BLOCK == 0) read_grid(w, row * groups + g, least(BLOCK, groups - g), scale, zero);
        const floats grid = grid_of(zero[g % BLOCK], bits);
        const int64_t last = least((g + 1) * group, inputs);
        for (int64_t start = g * group; start < last; start += RUN) {
            const float *at = x + start, *end = x + least(start + RUN, last);
            floats part[MOST];
            for (int t = 0; t < count; t++) part[t] = (floats){0};
#pragma GCC unroll 4
            for (; at < end; at += LANES, p += LANES / 8 * bits) {
                const floats level = levels_at(p, bits, grid);
                for (int t = 0; t < count; t++) {
                    floats value;
                    memcpy(&value, at + t * inputs, sizeof value);
                    part[t] = fused(level, value, part[t]);
                }
            }
            for (int t = 0; t < count; t++) total[t] = fused(part[t], (floats){0} + scale[g % BLOCK], total[t]);
        }
    }
    for (int t = 0; t < count; t++) {
        y[t * w->outputs + row] = sum_of(total[t]);
    }
}

ROW dequantize_row(const Weight *w, int64_t row, void *out, const int bits, const int half) {
    const int64_t inputs = w->inputs, groups = w->groups, group = w->group;
    const uint8_t *p = w->packed + row * w->stride;
    float scale[BLOCK], zero[BLOCK];
    for (int64_t g = 0; g < groups; g++) {
        if (g % BLOCK == 0) read_grid(w, row * groups + g, least(BLOCK, groups - g), scale, zero);
        const floats grid = grid_of(zero[g % BLOCK], bits);
        const int64_t last = row * inputs + least((g + 1) * group, inputs);
        for (int64_t at = row * inputs + g * group; at < last; at += LANES, p += LANES / 8 * bits) {
            const floats value = levels_at(p, bits, grid) * scale[g % BLOCK];
            if (half) {
                words b = (words)value;
                b = (b + 0x7fff + ((b >> 16) & 1)) >> 16; /* to the nearest, ties to even */
                const shorts rounded = __builtin_convertvector(b, shorts);
                memcpy((uint16_t *)out + at, &rounded, sizeof rounded);
            } else
                memcpy((float *)out + at, &value, sizeof value);
        }
    }
}

#define ALL_ROWS(CALL)                                                                    \
    _Pragma("omp parallel for num_threads(threads) if (threads > 1) schedule(static)")    \
    for (int64_t row = 0; row < w->outputs; row++) CALL

#define MULTIPLY(BITS, COUNT)                                    \
    if (bits == BITS && count == COUNT) {                        \
        ALL_ROWS(multiply_row(w, row, x, y, BITS, COUNT);)       \
        return;                                                  \
    }

#define MULTIPLY_ALL(BITS) MULTIPLY(BITS, 1) MULTIPLY(BITS, 2) MULTIPLY(BITS, 4) MULTIPLY(BITS, 8)

/* x: (count, inputs), y: (count, outputs); count is 1, 2, 4 or 8 */
void multiply(const Weight *w, const float *x, float *y, int bits, int count, int threads) {
    MULTIPLY_ALL(2) MULTIPLY_ALL(3) MULTIPLY_ALL(4) MULTIPLY_ALL(8)
}

#define DEQUANTIZE(BITS, HALF)                                   \
    if (bits == BITS && half == HALF) {                          \
        ALL_ROWS(dequantize_row(w, row, out, BITS, HALF);)       \
        return;                                                  \
    }

/* out: (outputs, inputs), bfloat16 if half is 1, else float32 */
void dequantize(const Weight *w, void *out, int bits, int half, int threads) {
    DEQUANTIZE(2, 0) DEQUANTIZE(3, 0) DEQUANTIZE(4, 0) DEQUANTIZE(8, 0)
    DEQUANTIZE(2, 1) DEQUANTIZE(3, 1) DEQUANTIZE(4, 1) DEQUANTIZE(8, 1)
}
