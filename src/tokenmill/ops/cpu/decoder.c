// A decoder's whole step in one call: tokens in, final states and logits out. See `models.packed` for what it serves.
#include "attention.h"
#include "linear.h"
#include "pack.h"

typedef struct {
    matrix qkv[3], output, gate_up[2], down;
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
    void *keys, *values;  // the layer's pools [kv slots, kv_heads, dim]
} layer;

typedef struct {
    int32_t hidden, inner, heads, kv_heads, dim, rotary_dim, num_layers, unused;
    float eps, rope_factor;
    matrix embedding, logits;
    const float *final_norm, *frequencies;
    const layer *layers;
} model;

typedef struct {
    attention_plan attention;
    int32_t tokens, sampled;
    const int64_t *ids, *kv_slots;
    const int32_t *positions, *drawing;  // drawing [sampled], into the tokens
    float *states, *logits;              // [sampled, hidden], and [sampled, vocab] or none
} step;

// Memory of a step, for all threads.
typedef struct {
    const model *model;
    const step *step;
    float *x, *qkv, *mixed, *inner, *angles;
    uint8_t *bytes;
} run;

// Norm, if there is one, and rotation of one head, where it stands.
static void prepare_head(float *head, const float *norm, const model *m, const float *angles) {
    if (norm) {
        v16f squares = {0};
        for (int i = 0; i < m->dim; i += LANES) squares += AT(v16f, head + i) * AT(v16f, head + i);
        float factor = 1 / sqrtf(sum_of(squares) / m->dim + m->eps);
        for (int i = 0; i < m->dim; i += LANES) PUT(head + i, AT(v16f, head + i) * AT(v16f, norm + i) * factor);
    }
    int half = m->rotary_dim / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half], cosine = angles[i], sine = angles[half + i];
        head[i] = a * cosine - b * sine, head[i + half] = b * cosine + a * sine;
    }
}

static void prepare_token(const run *r, const layer *l, int token) {
    const model *m = r->model;
    int dim = m->dim, kv_width = m->kv_heads * dim, is_bfloat = r->step->attention.is_bfloat;
    float *q = r->qkv + (size_t)token * (m->heads * dim + 2 * kv_width), *k = q + m->heads * dim, *v = k + kv_width;
    const float *angles = r->angles + (size_t)token * m->rotary_dim;
    for (int head = 0; head < m->heads; head++) prepare_head(q + head * dim, l->query_norm, m, angles);
    for (int head = 0; head < m->kv_heads; head++) prepare_head(k + head * dim, l->key_norm, m, angles);
    size_t place = (size_t)r->step->kv_slots[token] * kv_width;
    for (int i = 0; i < kv_width && is_bfloat; i++) {
        ((uint16_t *)l->keys)[place + i] = to_bfloat(k[i]);
        ((uint16_t *)l->values)[place + i] = to_bfloat(v[i]);
    }
    if (!is_bfloat) {
        memcpy((float *)l->keys + place, k, 4 * kv_width);
        memcpy((float *)l->values + place, v, 4 * kv_width);
    }
}

static void begin_token(const run *r, int token) {
    const model *m = r->model;
    int half = m->rotary_dim / 2;
    float *angles = r->angles + (size_t)token * m->rotary_dim;
    embed_row(&m->embedding, r->step->ids[token], r->x + (size_t)token * m->hidden);
    for (int i = 0; i < half; i++) {
        float angle = r->step->positions[token] * m->frequencies[i];
        angles[i] = cosf(angle) * m->rope_factor, angles[half + i] = sinf(angle) * m->rope_factor;
    }
}

static void run_step(worker *self, void *argument) {
    const run *r = argument;
    const model *m = r->model;
    const step *s = r->step;
    int tokens = s->tokens, width = (m->heads + 2 * m->kv_heads) * m->dim, mixed = m->heads * m->dim;
    for (int token; (token = take(self, tokens, 1)) >= 0;) begin_token(r, token);
    meet(self, tokens);
    for (const layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        rows_of_bytes x = quantise(self, r->bytes, r->x, l->attention_norm, m->eps, tokens, m->hidden);
        products(self, l->qkv, 3, x, tokens, r->qkv, width, 0);
        for (int token; (token = take(self, tokens, 1)) >= 0;) prepare_token(r, l, token);
        meet(self, tokens);
        attend(self, &s->attention, r->qkv, width, l->keys, l->values, r->mixed);
        x = quantise(self, r->bytes, r->mixed, NULL, 0, tokens, mixed);
        products(self, &l->output, 1, x, tokens, r->x, m->hidden, 1);
        x = quantise(self, r->bytes, r->x, l->mlp_norm, m->eps, tokens, m->hidden);
        gated(self, l->gate_up, x, tokens, r->inner);
        x = quantise(self, r->bytes, r->inner, NULL, 0, tokens, m->inner);
        products(self, &l->down, 1, x, tokens, r->x, m->hidden, 1);
    }
    for (int row; (row = take(self, s->sampled, 1)) >= 0;)
        memcpy(s->states + (size_t)row * m->hidden, r->x + (size_t)s->drawing[row] * m->hidden, 4 * m->hidden);
    meet(self, s->sampled);
    if (s->logits == NULL || !s->sampled) return;
    rows_of_bytes x = quantise(self, r->bytes, s->states, m->final_norm, m->eps, s->sampled, m->hidden);
    products(self, &m->logits, 1, x, s->sampled, s->logits, m->logits.lines, 0);
}

static void run_logits(worker *self, void *argument) {
    const run *r = argument;
    const model *m = r->model;
    const step *s = r->step;
    rows_of_bytes x = quantise(self, r->bytes, s->states, m->final_norm, m->eps, s->sampled, m->hidden);
    products(self, &m->logits, 1, x, s->sampled, s->logits, m->logits.lines, 0);
}

// Runs a step, or with no tokens makes logits of its states alone. 0, or -1: no memory.
int decoder_step(pool *all, const model *m, const step *s) {
    size_t tokens = s->tokens, rows = tokens > (size_t)s->sampled ? tokens : (size_t)s->sampled;
    int widest = m->inner > m->heads * m->dim ? m->inner : m->heads * m->dim;
    widest = widest > m->hidden ? widest : m->hidden;
    size_t sizes[] = {tokens * m->hidden, tokens * (m->heads + 2 * m->kv_heads) * m->dim, tokens * m->heads * m->dim,
                      tokens * m->inner, tokens * m->rotary_dim, bytes_for(rows, widest) / 4 + 16};
    float *places[6];
    size_t total = 0;
    for (int i = 0; i < 6; i++) total += (sizes[i] + 15) / 16 * 16;
    float *memory = aligned_alloc(64, total * 4);
    if (memory == NULL) return -1;
    size_t at = 0;
    for (int i = 0; i < 6; i++) places[i] = memory + at, at += (sizes[i] + 15) / 16 * 16;
    run r = {m, s, places[0], places[1], places[2], places[3], places[4], (uint8_t *)places[5]};
    run_all(all, tokens ? run_step : run_logits, &r, tokens ? 16 + 12 * m->num_layers : 4);
    free(memory);
    return 0;
}

typedef struct {
    const matrix *matrix;
    const float *x;
    float *y;
    uint8_t *bytes;
    int rows;
} product_call;

static void run_product(worker *self, void *argument) {
    const product_call *c = argument;
    rows_of_bytes x = quantise(self, c->bytes, c->x, NULL, 0, c->rows, c->matrix->inputs);
    products(self, c->matrix, 1, x, c->rows, c->y, c->matrix->lines, 0);
}

// y [rows, lines] = x [rows, inputs] times the matrix. 0, or -1: no memory.
int linear(pool *all, const matrix *m, const float *x, int rows, float *y) {
    uint8_t *bytes = aligned_alloc(64, bytes_for(rows, m->inputs) / 64 * 64 + 64);
    if (bytes == NULL) return -1;
    product_call call = {m, x, y, bytes, rows};
    run_all(all, run_product, &call, 4);
    free(bytes);
    return 0;
}

typedef struct {
    const attention_plan *plan;
    const float *query;
    const void *keys, *values;
    float *out;
} attention_call;

static void run_attention(worker *self, void *argument) {
    const attention_call *c = argument;
    attend(self, c->plan, c->query, (size_t)c->plan->heads * c->plan->dim, c->keys, c->values, c->out);
}

void attention(pool *all, const attention_plan *plan, const float *query, const void *keys, const void *values,
               float *out) {
    attention_call call = {plan, query, keys, values, out};
    run_all(all, run_attention, &call, 2);
}

// Rows `places` of logits [.., vocab] lose the ids whose bits are 0 in `masks` [rows, words]. Rows in which nothing is
// left become 0, and are marked in `dead`, a byte for each row of logits.
void mask_logits(float *logits, int vocab, int rows, const int64_t *places, const uint32_t *masks, int words,
                 uint8_t *dead) {
    for (int row = 0; row < rows; row++) {
        float *x = logits + (size_t)places[row] * vocab, most = -INFINITY;
        for (int first = 0; first < vocab; first += 32) {
            uint32_t bits = masks[(size_t)row * words + first / 32];
            int count = vocab - first < 32 ? vocab - first : 32;
            for (int i = 0; i < count; i++) x[first + i] = bits >> i & 1 ? x[first + i] : -INFINITY;
            for (int i = 0; bits && i < count; i++) most = x[first + i] > most ? x[first + i] : most;
        }
        dead[places[row]] = most == -INFINITY;
        if (most == -INFINITY) memset(x, 0, 4 * (size_t)vocab);
    }
}
