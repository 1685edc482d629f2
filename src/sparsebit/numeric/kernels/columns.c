/* Columns of a weight rounded one after the other, a block of them at a time. Matrices are (columns, rows), so that a
   column is one run of memory; rows do not touch each other and are taken in pieces that stay in the first cache.

   greedy:  q = rint(w_j / s) on the grid;  e_j = (w_j - q) / u_jj;          w_k -= u_jk e_j    for the k after j (GPTQ)
   descend: q = rint(q_j + pull_j / h_jj) on the grid;  step = q - q_j;      pull_k -= h_jk step (coordinate descent) */
#include <math.h>
#include <stdint.h>

#define PIECE 64

static inline float code_of(float v, float s, float z, float top) {
    float c = rintf(v / s) + z;
    c = c < 0.0f ? 0.0f : c;
    return c > top ? top : c;
}

static inline void subtract(float *restrict w, const float *restrict e, float by, int64_t n) {
    for (int64_t r = 0; r < n; r++) w[r] -= by * e[r];
}

/* w, errors: (block, rows); u: block x block inside a matrix of `stride`; codes: all columns, of which order[j] is
   written; scales, zeros: (groups, rows), of which group[j] is meant. */
void greedy(float *w, float *errors, const float *u, int64_t stride, uint8_t *codes, const int64_t *order,
            const int64_t *group, const float *scales, const float *zeros, int64_t block, int64_t rows, float top,
            int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t start = 0; start < rows; start += PIECE) {
        int64_t n = rows - start < PIECE ? rows - start : PIECE;
        for (int64_t j = 0; j < block; j++) {
            const float *s = scales + group[j] * rows + start, *z = zeros + group[j] * rows + start;
            float *v = w + j * rows + start, *e = errors + j * rows + start, pivot = u[j * stride + j];
            uint8_t *code = codes + order[j] * rows + start;
            for (int64_t r = 0; r < n; r++) {
                float c = code_of(v[r], s[r], z[r], top);
                code[r] = (uint8_t)c;
                e[r] = (v[r] - (c - z[r]) * s[r]) / pivot;
            }
            for (int64_t k = j + 1; k < block; k++) subtract(w + k * rows + start, e, u[j * stride + k], n);
        }
    }
}

/* pull, gap, codes: (block, rows), gap being w - q; h as u above. */
void descend(float *pull, float *gap, float *codes, const float *h, int64_t stride, const int64_t *group,
             const float *scales, const float *zeros, int64_t block, int64_t rows, float top, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t start = 0; start < rows; start += PIECE) {
        int64_t n = rows - start < PIECE ? rows - start : PIECE;
        float step[PIECE];
        for (int64_t j = 0; j < block; j++) {
            const float *s = scales + group[j] * rows + start, *z = zeros + group[j] * rows + start;
            float *p = pull + j * rows + start, *g = gap + j * rows + start, *c = codes + j * rows + start;
            float pivot = h[j * stride + j];
            for (int64_t r = 0; r < n; r++) {
                float new = code_of((c[r] - z[r]) * s[r] + p[r] / pivot, s[r], z[r], top);
                step[r] = (new - c[r]) * s[r];
                c[r] = new;
                g[r] -= step[r];
            }
            for (int64_t k = j + 1; k < block; k++) subtract(pull + k * rows + start, step, h[j * stride + k], n);
        }
    }
}

/* Of `tries` grids (tries, groups) the one with the least sum of importance * (w - q)^2 over each group of w (groups,
   size), the first of equals; group i has the importance of run i % period. */
void least(const float *w, const float *importance, const float *scales, const float *zeros, int64_t tries,
           int64_t groups, int64_t size, int64_t period, float top, float *scale, float *zero, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t g = 0; g < groups; g++) {
        const float *v = w + g * size, *weight = importance + g % period * size;
        float lowest = INFINITY;
        scale[g] = scales[g], zero[g] = zeros[g];
        for (int64_t t = 0; t < tries; t++) {
            float s = scales[t * groups + g], z = zeros[t * groups + g], sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++) {
                float gap = (code_of(v[i], s, z, top) - z) * s - v[i];
                sum += gap * gap * weight[i];
            }
            if (sum < lowest) lowest = sum, scale[g] = s, zero[g] = z;
        }
    }
}
