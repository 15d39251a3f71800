// Lines of a checkpoint into the tiles of `linear.h`: as they are where blocks of 32 fit, else made from numbers.
#pragma once
#include "linear.h"

enum { FLOATS, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12 };

typedef struct {
    uint16_t scale, least;
    uint8_t numbers[BLOCK];
} block;

static block from_numbers(const float *x, int bits) {
    float low = x[0], high = x[0];
    for (int i = 1; i < BLOCK; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    block b = {0};
    if (bits == 4) b.scale = float_to_half((high - low) / 15), b.least = float_to_half(low);
    else b.scale = float_to_half((high > -low ? high : -low) / 127);
    float scale = half_to_float(b.scale), least = bits == 4 ? half_to_float(b.least) : 0;
    for (int i = 0; i < BLOCK; i++) {
        float q = scale ? rintf((x[i] - least) / scale) : 0, end = bits == 4 ? 15 : 127, start = bits == 4 ? 0 : -128;
        b.numbers[i] = (uint8_t)((int)(q < start ? start : q > end ? end : q) + (bits == 4 ? 0 : 128));
    }
    return b;
}

// Block number `index` of a line.
static block from_file(const uint8_t *line, int index, int kind) {
    int bytes = kind == Q4_0 ? 18 : kind == Q4_1 ? 20 : 34;
    const uint8_t *from = line + (kind == Q4_K ? index / 8 * 144 : index * bytes), *numbers = from + bytes - 16;
    block b = {.scale = AT(uint16_t, from)};
    if (kind == Q4_0) b.least = float_to_half(-8 * half_to_float(b.scale));
    if (kind == Q4_1) b.least = AT(uint16_t, from + 2);
    if (kind == Q4_K) {  // 8 blocks share 2 scales of their own scales and minima, which have 6 bits
        const uint8_t *six = from + 4;
        int at = index % 8, scale = six[at] & 63, least = six[at + 4] & 63;
        if (at >= 4) {
            scale = (six[at + 4] & 15) | six[at - 4] >> 6 << 4;
            least = six[at + 4] >> 4 | six[at] >> 6 << 4;
        }
        b.scale = float_to_half(half_to_float(b.scale) * scale);
        b.least = float_to_half(-half_to_float(AT(uint16_t, from + 2)) * least);
        for (int i = 0; i < BLOCK; i++) b.numbers[i] = from[16 + at / 2 * 32 + i] >> at % 2 * 4 & 15;
        return b;
    }
    for (int i = 0; i < BLOCK; i++)
        b.numbers[i] = kind == Q8_0 ? from[2 + i] ^ 0x80 : numbers[i % 16] >> (i < 16 ? 0 : 4) & 15;
    return b;
}

// `count` lines from `first` on, each `line_bytes` long, of the kind (GGUF's number, or 0: float32).
void pack(uint8_t *data, int bits, int inputs, int kind, const uint8_t *lines, int first, int count, size_t line_bytes) {
    size_t block_bytes = bits == 4 ? BYTES_4 : BYTES_8;
    for (int line = first; line < first + count; line++, lines += line_bytes) {
        uint8_t *to = data + line / LANES * (inputs / BLOCK * block_bytes);
        int lane = line % LANES;
        for (int i = 0; i < inputs / BLOCK; i++, to += block_bytes) {
            block b = kind == FLOATS ? from_numbers((const float *)lines + i * BLOCK, bits)
                                     : from_file(lines, i, kind);
            memcpy(to + 2 * lane, &b.scale, 2);
            if (bits == 4) memcpy(to + 32 + 2 * lane, &b.least, 2);
            uint8_t *bytes = to + (bits == 4 ? 64 : 32) + 4 * lane;
            for (int j = 0; j < (bits == 4 ? 16 : BLOCK); j++)
                bytes[j / 4 * 64 + j % 4] = bits == 4 ? b.numbers[j] | b.numbers[j + 16] << 4 : b.numbers[j];
        }
    }
}
