/* Fake quantization in one pass, forward and backward, over (outer, channels, inner) with a grid per channel.

   forward:   y  = clamp(rint(x / s), lo, hi) * s
   backward:  gx = g where x is inside the grid, else 0
              sums[0] = sum of g * (rint(x / s) - x / s) inside, of g * lo or g * hi outside     (gradient of s)
              sums[1] = sum of g outside                                              (gradient of z, times -s)

   Work is cut into pieces whose sums are written one by one, so that the result does not depend on the number of
   threads. lo and hi are the lowest and the highest code minus the zero point. NaN stays NaN. */
#include <math.h>
#include <stdint.h>

static inline float clampf(float r, float lo, float hi) {
    r = r < lo ? lo : r;
    return r > hi ? hi : r;
}

static void forward_run(const float *restrict x, float *restrict y, int64_t n, float s, float lo, float hi) {
    for (int64_t i = 0; i < n; i++) y[i] = clampf(rintf(x[i] / s), lo, hi) * s;
}

static void backward_run(const float *restrict x, const float *restrict g, float *restrict gx, int64_t n, float s, float lo, float hi,
                         double *sums) {
    float scale = 0, outside = 0; /* a run is short: float will do */
#pragma omp simd reduction(+ : scale, outside)
    for (int64_t i = 0; i < n; i++) {
        float v = x[i] / s, r = rintf(v), c = clampf(r, lo, hi), grad = g[i];
        float in = r == c ? grad : 0.0f;
        gx[i] = in;
        scale += grad * (c - (r == c ? v : 0.0f));
        outside += grad - in;
    }
    sums[0] = scale, sums[1] = outside;
}

/* Every channel is a run of `inner` values, cut into `pieces`; sums: (outer * channels * pieces, 2). */
void forward(const float *x, float *y, int64_t outer, int64_t channels, int64_t inner, int64_t pieces,
             const float *s, const float *lo, const float *hi, int threads) {
    int64_t size = (inner + pieces - 1) / pieces;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t k = 0; k < outer * channels * pieces; k++) {
        int64_t row = k / pieces, c = row % channels, start = k % pieces * size;
        int64_t n = start + size > inner ? inner - start : size;
        if (n > 0) forward_run(x + row * inner + start, y + row * inner + start, n, s[c], lo[c], hi[c]);
    }
}

void backward(const float *x, const float *g, float *gx, int64_t outer, int64_t channels, int64_t inner,
              int64_t pieces, const float *s, const float *lo, const float *hi, double *sums, int threads) {
    int64_t size = (inner + pieces - 1) / pieces;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t k = 0; k < outer * channels * pieces; k++) {
        int64_t row = k / pieces, c = row % channels, start = k % pieces * size, at = row * inner + start;
        int64_t n = start + size > inner ? inner - start : size;
        sums[2 * k] = sums[2 * k + 1] = 0;
        if (n > 0) backward_run(x + at, g + at, gx + at, n, s[c], lo[c], hi[c], sums + 2 * k);
    }
}

/* Channels are the fastest axis; sums: (pieces, 2, channels). */
void forward_last(const float *x, float *y, int64_t outer, int64_t channels, int64_t pieces, const float *s,
                  const float *lo, const float *hi, int threads) {
    int64_t size = (outer + pieces - 1) / pieces;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t k = 0; k < pieces; k++)
        for (int64_t row = k * size; row < (k + 1) * size && row < outer; row++)
            for (int64_t c = 0; c < channels; c++) {
                int64_t i = row * channels + c;
                y[i] = clampf(rintf(x[i] / s[c]), lo[c], hi[c]) * s[c];
            }
}

void backward_last(const float *x, const float *g, float *gx, int64_t outer, int64_t channels, int64_t pieces,
                   const float *s, const float *lo, const float *hi, double *sums, int threads) {
    int64_t size = (outer + pieces - 1) / pieces;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t k = 0; k < pieces; k++) {
        double *scale = sums + 2 * k * channels, *outside = scale + channels;
        for (int64_t c = 0; c < channels; c++) scale[c] = outside[c] = 0;
        for (int64_t row = k * size; row < (k + 1) * size && row < outer; row++)
            for (int64_t c = 0; c < channels; c++) {
                int64_t i = row * channels + c;
                float v = x[i] / s[c], r = rintf(v), q = clampf(r, lo[c], hi[c]), in = r == q ? g[i] : 0.0f;
                gx[i] = in;
                scale[c] += g[i] * (q - (r == q ? v : 0.0f));
                outside[c] += g[i] - in;
            }
    }
}
