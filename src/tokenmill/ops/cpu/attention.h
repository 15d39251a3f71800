// Causal attention over paged K and V, without gathering them; softmax as it goes (Milakov and Gimelshein 2018).
#pragma once
#include "pool.h"
#include "vectors.h"

#define KEYS 64  // at a time
#define MAX_DIM 256
#define MAX_GROUP 16

typedef struct {
    int32_t heads, kv_heads, dim, page_size, rows, is_bfloat, pages_stride, unused;
    float scale, unused_2;
    const int64_t *page_table;                  // [slots, pages_stride]
    const int32_t *slots, *starts, *firsts;     // of each row; firsts [rows + 1]: its tokens among the step's
} attention_plan;

typedef struct {
    float keys[KEYS * MAX_DIM];
    v16f queries[MAX_DIM], mixed[MAX_DIM], scores[KEYS];
} attention_scratch;

// Numbers of K or V of 16 neighbouring dimensions.
INLINE v16f kv_numbers(const void *pool, size_t at, int is_bfloat) {
    return is_bfloat ? bfloats((const uint16_t *)pool + at) : AT(v16f, (const float *)pool + at);
}

INLINE size_t place_of(const attention_plan *p, int row, int position) {
    int64_t page = p->page_table[(size_t)p->slots[row] * p->pages_stride + position / p->page_size];
    return (size_t)(page * p->page_size + position % p->page_size) * p->kv_heads * p->dim;
}

// Numbers of one K or V are needed soon.
INLINE void expect(const attention_plan *p, const void *pool, size_t place) {
    size_t size = p->is_bfloat ? 2 : 4;
    for (size_t at = 0; at < p->dim * size; at += 64) __builtin_prefetch((const char *)pool + place * size + at);
}

// One token: lanes are dimensions, and the heads that share K and V take what is loaded in turn.
INLINE void attend_parts(int parts, const attention_plan *p, int row, int kv_head, const float *query,
                         const void *keys, const void *values, float *out) {
    int dim = p->dim, group = p->heads / p->kv_heads, context = p->starts[row] + 1;
    v16f mixed[MAX_GROUP][MAX_DIM / LANES], sums[MAX_GROUP][LANES];
    float scores[MAX_GROUP][KEYS], most[MAX_GROUP], total[MAX_GROUP];
    size_t places[KEYS];
    for (int g = 0; g < group; g++) {
        most[g] = -INFINITY, total[g] = 0;
        for (int i = 0; i < parts; i++) mixed[g][i] = (v16f){0};
    }
    for (int first = 0; first < context; first += KEYS) {
        int count = context - first < KEYS ? context - first : KEYS;
        for (int j = 0; j < count; j++) {
            places[j] = place_of(p, row, first + j) + (size_t)kv_head * dim;
            if (j < LANES) expect(p, keys, places[j]);
        }
        for (int start = 0; start < count; start += LANES) {
            for (int j = 0; j < LANES; j++) {
                size_t place = places[start + j < count ? start + j : count - 1];
                if (start + j + LANES < count) expect(p, keys, places[start + j + LANES]);
                expect(p, values, place);
                v16f key[MAX_DIM / LANES];
                for (int i = 0; i < parts; i++) key[i] = kv_numbers(keys, place + i * LANES, p->is_bfloat);
                for (int g = 0; g < group; g++) {
                    v16f sum = {0};
                    for (int i = 0; i < parts; i++) sum += AT(v16f, query + g * dim + i * LANES) * key[i];
                    sums[g][j] = sum;
                }
            }
            for (int g = 0; g < group; g++) PUT(scores[g] + start, sums_of(sums[g]) * p->scale);
        }
        for (int g = 0; g < group; g++) {
            for (int j = count; j < KEYS; j++) scores[g][j] = -INFINITY;
            v16f best = AT(v16f, scores[g]), sum = {0};
            for (int j = LANES; j < KEYS; j += LANES) best = larger(best, AT(v16f, scores[g] + j));
            float now = max_of(best);
            now = now > most[g] ? now : most[g];
            float kept = exp_of(splat(most[g] - now))[0];
            for (int j = 0; j < KEYS; j += LANES) {
                v16f e = exp_of(AT(v16f, scores[g] + j) - now);
                e = choose(AT(v16f, scores[g] + j) > -INFINITY, e, splat(0));
                PUT(scores[g] + j, e);
                sum += e;
            }
            total[g] = total[g] * kept + sum_of(sum), most[g] = now;
            v16f its[MAX_DIM / LANES];
            for (int i = 0; i < parts; i++) its[i] = mixed[g][i] * kept;
            for (int j = 0; j < count; j++)
                for (int i = 0; i < parts; i++)
                    its[i] += scores[g][j] * kv_numbers(values, places[j] + i * LANES, p->is_bfloat);
            for (int i = 0; i < parts; i++) mixed[g][i] = its[i];
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < parts; i++) PUT(out + g * dim + i * LANES, mixed[g][i] / total[g]);
}

static __attribute__((noinline)) void attend_token(const attention_plan *p, int row, int kv_head, const float *query,
                                                   const void *keys, const void *values, float *out) {
    if (p->dim == 64) attend_parts(4, p, row, kv_head, query, keys, values, out);
    else if (p->dim == 128) attend_parts(8, p, row, kv_head, query, keys, values, out);
    else attend_parts(p->dim / LANES, p, row, kv_head, query, keys, values, out);
}

// Up to 16 neighbouring queries of a row and of the heads that share K and V: lanes are queries.
static __attribute__((noinline)) void attend_queries(const attention_plan *p, int row, int kv_head, int pair,
                                                     int pairs, const float *query, size_t stride, const void *keys,
                                                     const void *values, float *out, attention_scratch *s) {
    int dim = p->dim, group = p->heads / p->kv_heads, start = p->starts[row];
    v16i limits = {0};
    for (int lane = 0; lane < LANES; lane++) {
        int its = pair + lane < pairs ? pair + lane : pairs - 1;
        const float *from = query + (size_t)(its / group) * stride + (kv_head * group + its % group) * dim;
        limits[lane] = start + its / group;
        for (int i = 0; i < dim; i++) ((float *)(s->queries + i))[lane] = from[i] * p->scale;
    }
    for (int i = 0; i < dim; i++) s->mixed[i] = (v16f){0};
    v16f most = splat(-INFINITY), total = {0};
    int context = limits[LANES - 1] + 1;
    for (int first = 0; first < context; first += KEYS) {
        int count = context - first < KEYS ? context - first : KEYS;
        for (int j = 0; j < (count + 7) / 8 * 8; j++) {
            if (j < count) {
                size_t place = place_of(p, row, first + j) + (size_t)kv_head * dim;
                for (int i = 0; i < dim; i += LANES) PUT(s->keys + j * dim + i, kv_numbers(keys, place + i, p->is_bfloat));
            } else memset(s->keys + j * dim, 0, 4 * dim);
        }
        v16f now = most;
        for (int j = 0; j < count; j += 8) {
            v16f sums[8] = {{0}};
            const float *key = s->keys + j * dim;
            for (int i = 0; i < dim; i++) {
                v16f q = s->queries[i];
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) sums[k] += q * key[k * dim + i];
            }
            for (int k = 0; k < 8; k++) {
                v16i position = (v16i){0} + (first + j + k);
                s->scores[j + k] = choose(position <= limits, sums[k], splat(-INFINITY));
                now = larger(now, s->scores[j + k]);
            }
        }
        v16f kept = exp_of(most - now);
        most = now, total *= kept;
        for (int j = 0; j < count; j++) {
            s->scores[j] = exp_of(s->scores[j] - now);
            total += choose(now > -INFINITY, s->scores[j], splat(0));
            size_t place = place_of(p, row, first + j) + (size_t)kv_head * dim;
            for (int i = 0; i < dim; i += LANES) PUT(s->keys + j * dim + i, kv_numbers(values, place + i, p->is_bfloat));
        }
        for (int at = 0; at < dim; at += 16) {
            v16f sums[16];
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) sums[k] = s->mixed[at + k] * kept;
            for (int j = 0; j < count; j++) {
                v16f share = s->scores[j];
                const float *value = s->keys + j * dim + at;
#pragma GCC unroll 16
                for (int k = 0; k < 16; k++) sums[k] += share * value[k];
            }
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) s->mixed[at + k] = sums[k];
        }
    }
    for (int lane = 0; lane < LANES && pair + lane < pairs; lane++) {
        int its = pair + lane;
        float *to = out + ((size_t)(its / group) * p->heads + kv_head * group + its % group) * dim;
        for (int i = 0; i < dim; i++) to[i] = ((float *)(s->mixed + i))[lane] / total[lane];
    }
}

// Queries [tokens, stride] of a step to what they attend to, out [tokens, heads * dim]. Ends the phase.
static void attend(worker *self, const attention_plan *p, const float *query, size_t stride, const void *keys,
                   const void *values, float *out) {
    int group = p->heads / p->kv_heads, tasks = 0, before = 0, row = 0;
    attention_scratch *scratch = (attention_scratch *)scratch_of(self, sizeof *scratch);
#define TASKS(r) ((((p->firsts[(r) + 1] - p->firsts[r]) * group + LANES - 1) / LANES) * p->kv_heads)
    for (int r = 0; r < p->rows; r++) tasks += TASKS(r);
    for (int task; (task = take(self, tasks, 1)) >= 0;) {
        for (; task >= before + TASKS(row); row++) before += TASKS(row);
        int first = p->firsts[row], length = p->firsts[row + 1] - first, kv_head = (task - before) % p->kv_heads;
        int block = (task - before) / p->kv_heads;
        const float *its = query + first * stride;
        float *to = out + (size_t)first * p->heads * p->dim;
        if (length == 1) {
            if (block) continue;
            size_t at = (size_t)kv_head * group * p->dim;
            attend_token(p, row, kv_head, its + at, keys, values, to + at);
        } else {
            attend_queries(p, row, kv_head, block * LANES, length * group, its, stride, keys, values, to, scratch);
        }
    }
    meet(self, tasks);
}
