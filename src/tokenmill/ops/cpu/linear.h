// Products of packed weights and rows of activations.
//
// A packed matrix is tiles of 16 lines (outputs); a tile is blocks of 32 inputs. A block of 4 bits: 16 scales and 16
// minima (float16), then 4 x 64 bytes; byte 4 * line + j of group g holds input 4g + j low, 16 + 4g + j high. A block
// of 8 bits: 16 scales, then 8 x 64 bytes, each number 128 more than it is.
#pragma once
#include "pool.h"
#include "vectors.h"

#define BYTES_4 (64 + 256)
#define BYTES_8 (32 + 512)
#define ROWS 8  // of activations at a time
#define FEW 4   // rows that every thread quantises for itself, which spares a barrier

typedef struct {
    int32_t bits, lines, inputs, unused;
    const uint8_t *data;
    const float *bias;
} matrix;

// Rows of activations in signed bytes: number = bytes * scale, by blocks; sums are those of a block's numbers. Rows
// that are multiplied together lie together: block 0 of each, block 1 of each, ...
typedef struct {
    int8_t *bytes;
    float *scales, *sums;
    int rows;
} rows_of_bytes;

// The chunk of a row: there are as many of 8 as rows fill, then one each of 4, 2 and 1 as needed.
INLINE void find_chunk(int rows, int row, int *first, int *size) {
    *size = ROWS, *first = row / ROWS * ROWS;
    if (rows - *first >= ROWS) return;
    for (*size = ROWS / 2; !((rows - *first) & *size); *size /= 2) {}
    while (row >= *first + *size) {
        *first += *size;
        do *size /= 2;
        while (!((rows - *first) & *size));
    }
}

INLINE size_t tile_bytes(const matrix *m) { return (size_t)m->inputs / BLOCK * (m->bits == 4 ? BYTES_4 : BYTES_8); }
INLINE int tiles_of(const matrix *m) { return (m->lines + LANES - 1) / LANES; }

static rows_of_bytes lay_out(uint8_t *memory, int rows, int inputs) {
    float *scales = (float *)memory;
    size_t count = (size_t)rows * inputs / BLOCK;
    return (rows_of_bytes){(int8_t *)(scales + 2 * count), scales, scales + count, rows};
}
static size_t bytes_for(int rows, int inputs) { return (size_t)rows * inputs / BLOCK * (BLOCK + 8) + 64; }

// One row, normalised first if there is a norm.
static void quantise_row(const float *x, const float *norm, float eps, int inputs, rows_of_bytes out, int row) {
    float factor = 1;
    if (norm) {
        v16f squares = {0};
        for (int i = 0; i < inputs; i += LANES) squares += AT(v16f, x + i) * AT(v16f, x + i);
        factor = 1 / sqrtf(sum_of(squares) / inputs + eps);
    }
    int first, size;
    find_chunk(out.rows, row, &first, &size);
    for (int i = 0; i < inputs; i += BLOCK) {
        v16f half[2];
        for (int j = 0; j < 2; j++) {
            half[j] = AT(v16f, x + i + LANES * j);
            if (norm) half[j] *= AT(v16f, norm + i + LANES * j) * factor;
        }
        float most = max_of(larger(larger(half[0], -half[0]), larger(half[1], -half[1])));
        float scale = most / 127, inverse = most > 0 ? 127 / most : 0;
        v16i sums = {0};
        size_t place = (size_t)first * (inputs / BLOCK) + (size_t)i / BLOCK * size + row - first;
        for (int j = 0; j < 2; j++) {
            v16i number = (v16i)(half[j] * inverse + 12582912.0f) - 0x4b400000;  // to nearest
            sums += number;
            typedef int8_t v16c __attribute__((vector_size(16)));
            PUT(out.bytes + place * BLOCK + LANES * j, __builtin_convertvector(number, v16c));
        }
        out.scales[place] = scale;
        out.sums[place] = scale * sum_of(to_float(sums));
    }
}

INLINE void tile_rows(int bits, int rows, const uint8_t *w, int inputs, rows_of_bytes x, int row, v16f *out) {
    int blocks = inputs / BLOCK;
    const int8_t *bytes = x.bytes + (size_t)row * inputs;
    const float *scales = x.scales + (size_t)row * blocks, *sums = x.sums + (size_t)row * blocks;
    v16f total[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) total[r] = (v16f){0};
    for (int b = 0; b < blocks; b++, bytes += rows * BLOCK, scales += rows, sums += rows) {
        v16i dots[ROWS];
        v16f scale = halves(w), least = bits == 4 ? halves(w + 32) : -128 * scale;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) dots[r] = (v16i){0};
        w += bits == 4 ? 64 : 32;
#pragma GCC unroll 8
        for (int g = 0; g < bits; g++, w += 64) {
            v64b both = AT(v64b, w), low = bits == 4 ? both & 15 : both, high = both >> 4;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int8_t *place = bytes + r * BLOCK + 4 * g;
                dots[r] = dot4(dots[r], low, AT(int32_t, place), bits == 4);
                if (bits == 4) dots[r] = dot4(dots[r], high, AT(int32_t, place + 16), 1);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            total[r] += to_float(dots[r]) * scales[r] * scale;
            total[r] += least * sums[r];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) out[r] = total[r];
}

#define TILE(bits, rows)                                                                                         \
    static __attribute__((noinline)) void tile_##bits##_##rows(const uint8_t *w, int inputs, rows_of_bytes x,     \
                                                               int row, v16f *out) {                              \
        tile_rows(bits, rows, w, inputs, x, row, out);                                                            \
    }
TILE(4, 1)
TILE(4, 2)
TILE(4, 4)
TILE(4, 8)
TILE(8, 1)
TILE(8, 2)
TILE(8, 4)
TILE(8, 8)

typedef void (*tile_function)(const uint8_t *, int, rows_of_bytes, int, v16f *);

// The products of tile number `tile` and up to 8 rows from `row` on, into out [rows] of 16 lines; how many it made.
static int multiply(const matrix *m, int tile, rows_of_bytes x, int row, int rows, v16f *out) {
    static const tile_function functions[2][4] = {{tile_4_1, tile_4_2, tile_4_4, tile_4_8},
                                                  {tile_8_1, tile_8_2, tile_8_4, tile_8_8}};
    int log = rows >= 8 ? 3 : rows >= 4 ? 2 : rows >= 2 ? 1 : 0, made = 1 << log;  // as `find_chunk` has them
    functions[m->bits == 8][log](m->data + tile * tile_bytes(m), m->inputs, x, row, out);
    if (m->bias) {
        v16f bias = {0};
        int count = m->lines - tile * LANES;
        memcpy(&bias, m->bias + tile * LANES, 4 * (count < LANES ? count : LANES));
        for (int r = 0; r < made; r++) out[r] += bias;
    }
    return made;
}

// x as bytes where all threads see them, or each thread for itself where they are few. Ends the phase if shared.
static rows_of_bytes quantise(worker *self, uint8_t *shared, const float *x, const float *norm, float eps, int rows,
                              int inputs) {
    int is_own = rows <= FEW;
    rows_of_bytes out = lay_out(is_own ? scratch_of(self, bytes_for(rows, inputs)) : shared, rows, inputs);
    if (is_own) {
        for (int row = 0; row < rows; row++) quantise_row(x + (size_t)row * inputs, norm, eps, inputs, out, row);
        return out;
    }
    for (int row; (row = take(self, rows, 1)) >= 0;)
        quantise_row(x + (size_t)row * inputs, norm, eps, inputs, out, row);
    meet(self, rows);
    return out;
}

static inline void put_lines(float *to, v16f value, int lines, int is_sum) {
    if (lines >= LANES) {
        PUT(to, is_sum ? AT(v16f, to) + value : value);
        return;
    }
    for (int i = 0; i < lines; i++) to[i] = is_sum ? to[i] + value[i] : value[i];
}

// y [rows, stride] = x times each matrix, one behind the other; or added to y. Ends the phase.
static void products(worker *self, const matrix *m, int count, rows_of_bytes x, int rows, float *y, size_t stride,
                     int is_sum) {
    int tiles = 0;
    for (int i = 0; i < count; i++) tiles += tiles_of(m + i);
    int chunk = tiles / (8 * self->pool->size);
    chunk = chunk < 1 ? 1 : chunk > 16 ? 16 : chunk;
    for (int first; (first = take(self, tiles, chunk)) >= 0;) {
        for (int at = first; at < first + chunk && at < tiles; at++) {
            const matrix *its = m;
            int tile = at;
            size_t before = 0;
            for (; tile >= tiles_of(its); its++) tile -= tiles_of(its), before += its->lines;
            v16f out[ROWS];
            for (int row = 0, made; row < rows; row += made) {
                made = multiply(its, tile, x, row, rows - row, out);
                for (int r = 0; r < made; r++)
                    put_lines(y + (row + r) * stride + before + tile * LANES, out[r], its->lines - tile * LANES, is_sum);
            }
        }
    }
    meet(self, tiles);
}

// y [rows, lines] = silu(x times gate) * (x times up). Ends the phase.
static void gated(worker *self, const matrix *m, rows_of_bytes x, int rows, float *y) {
    int tiles = tiles_of(m), lines = m->lines, chunk = tiles / (8 * self->pool->size);
    chunk = chunk < 1 ? 1 : chunk > 8 ? 8 : chunk;
    for (int first; (first = take(self, tiles, chunk)) >= 0;) {
        for (int tile = first; tile < first + chunk && tile < tiles; tile++) {
            v16f gate[ROWS], up[ROWS];
            for (int row = 0, made; row < rows; row += made) {
                made = multiply(m, tile, x, row, rows - row, gate);
                multiply(m + 1, tile, x, row, rows - row, up);
                for (int r = 0; r < made; r++) {
                    v16f size = larger(gate[r], -gate[r]), e = exp_of(-size);
                    v16f share = choose(gate[r] > 0, splat(1), e) / (1 + e);
                    put_lines(y + (size_t)(row + r) * lines + tile * LANES, gate[r] * share * up[r],
                              lines - tile * LANES, 0);
                }
            }
        }
    }
    meet(self, tiles);
}

// The numbers of a line; of one that there is not, zeros.
static void embed_row(const matrix *m, int64_t line, float *out) {
    if (line < 0 || line >= m->lines) {
        memset(out, 0, 4 * m->inputs);
        return;
    }
    const uint8_t *w = m->data + line / LANES * tile_bytes(m);
    int lane = line % LANES;
    for (int i = 0; i < m->inputs; i += BLOCK, w += m->bits == 4 ? BYTES_4 : BYTES_8) {
        float scale = half_to_float(AT(uint16_t, w + 2 * lane));
        float least = m->bits == 4 ? half_to_float(AT(uint16_t, w + 32 + 2 * lane)) : -128 * scale;
        const uint8_t *bytes = w + (m->bits == 4 ? 64 : 32) + 4 * lane;
        for (int j = 0; j < BLOCK; j++) {
            int q = m->bits == 4 ? bytes[j % 16 / 4 * 64 + j % 4] >> (j < 16 ? 0 : 4) & 15 : bytes[j / 4 * 64 + j % 4];
            out[i + j] = q * scale + least;
        }
    }
}
