/*
 * Values of synthetic states: a hash of (name, position, seed, step), shaped so that a compressor
 * sees what it would see in real weights and moments. Any element can be had alone, so every rank
 * fills its own boxes and a check needs no copy of what was saved.
 *
 *   hash(i)   = mix(key + (i + 1) * golden), key from seed, name and step (SplitMix64)
 *   normal(i) = sum of three 21-bit pieces of hash(i), centred: deviation 1, within 3 of 0
 */
#include "tools/bench/bench.h"

#include "base/text.h"

#include <string.h>

enum { FLAT, NORMAL, SQUARE, CONSTANT };

static const uint64_t golden = 0x9E3779B97F4A7C15u;

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

uint64_t bench_hash(uint64_t seed, const char *name, size_t name_size, int64_t step)
{
    uint64_t fnv = 0xCBF29CE484222325u;
    for (size_t i = 0; i < name_size; i++)
        fnv = (fnv ^ (unsigned char)name[i]) * 0x100000001B3u;
    return mix(mix(seed ^ fnv) + (uint64_t)step * golden);
}

static uint64_t hash_at(uint64_t key, int64_t i)
{
    return mix(key + ((uint64_t)i + 1) * golden);
}

/* --- distributions ---------------------------------------------------------------------------- */

static bool is_norm(const char *name, size_t size)
{
    return (memmem(name, size, "norm", 4) || memmem(name, size, "ln_", 3)) &&
           fsdp_bytes_end(name, size, ".weight");
}

bench_stream bench_stream_of(const fsdp_entry *entry, uint64_t seed, int64_t step)
{
    const char *name = entry->name;
    size_t size = entry->name_size;
    bool is_optim = size > 6 && memcmp(name, "optim.", 6) == 0;
    bench_stream stream = {.key = bench_hash(seed, name, size, step), .dtype = entry->dtype};
    const fsdp_dtype_info *info = fsdp_dtype_describe(entry->dtype);
    stream.shape = info && info->is_float ? NORMAL : FLAT;
    stream.scale = 0.02f;
    if (is_optim && fsdp_bytes_end(name, size, ".step")) {
        stream.shape = CONSTANT;
        stream.mean = (float)step;
    } else if (is_optim && fsdp_bytes_end(name, size, ".exp_avg")) {
        stream.scale = 1.1e-4f;
    } else if (is_optim && fsdp_bytes_end(name, size, ".exp_avg_sq")) {
        stream.shape = SQUARE;
        stream.scale = 1.7e-7f;
    } else if (is_norm(name, size)) {
        stream.mean = 1.0f;
        stream.scale = 0.11f;
    }
    return stream;
}

/* --- elements --------------------------------------------------------------------------------- */

static float normal_of(uint64_t hash)
{
    const uint64_t piece = (1u << 21) - 1;
    int32_t sum = (int32_t)((hash & piece) + (hash >> 21 & piece) + (hash >> 42 & piece));
    return (float)(sum - (3 << 20)) * 0x1p-20f;
}

static void fill_normal(const bench_stream *stream, int64_t first, int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = stream->mean + stream->scale * normal_of(hash_at(stream->key, first + i));
}

/* Positive, as a mean of squares is. */
static void fill_square(const bench_stream *stream, int64_t first, int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i++) {
        float x = normal_of(hash_at(stream->key, first + i));
        out[i] = stream->scale * (x * x) + 1e-14f;
    }
}

static void fill_f32(const bench_stream *stream, int64_t first, int64_t count, float *out)
{
    switch (stream->shape) {
    case NORMAL: fill_normal(stream, first, count, out); break;
    case SQUARE: fill_square(stream, first, count, out); break;
    default:
        for (int64_t i = 0; i < count; i++)
            out[i] = stream->mean;
    }
}

/* Rounded to nearest, ties to even; our values have no NaN. */
static uint16_t bf16_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

enum { PIECE = 2048 }; /* elements that are made at once */

static void fill_float(const bench_stream *stream, int64_t first, int64_t count, char *out)
{
    float values[PIECE];
    fill_f32(stream, first, count, values);
    for (int64_t i = 0; i < count; i++) {
        double wide = (double)values[i];
        uint16_t half = bf16_of(values[i]);
        if (stream->dtype == FSDP_F64)
            memcpy(out + i * 8, &wide, 8);
        else
            memcpy(out + i * 2, &half, 2);
    }
}

static void fill_flat(const bench_stream *stream, int64_t first, int64_t count, char *out)
{
    size_t size = fsdp_dtype_size(stream->dtype);
    for (int64_t i = 0; i < count; i++) {
        uint64_t hash = hash_at(stream->key, first + i);
        if (stream->dtype == FSDP_BOOL)
            hash &= 1;
        memcpy(out + (size_t)i * size, &hash, size);
    }
}

void bench_stream_fill(const bench_stream *stream, int64_t first, int64_t count, void *data_out)
{
    char *out = data_out;
    size_t size = fsdp_dtype_size(stream->dtype);
    for (int64_t done = 0; done < count;) {
        int64_t n = count - done < PIECE ? count - done : PIECE;
        char *to = out + (size_t)done * size;
        if (stream->dtype == FSDP_F32)
            fill_f32(stream, first + done, n, (float *)(void *)to);
        else if (stream->shape == FLAT)
            fill_flat(stream, first + done, n, to);
        else
            fill_float(stream, first + done, n, to);
        done += n;
    }
}

static int64_t first_difference(const char *a, const char *b, int64_t count, size_t size)
{
    for (int64_t i = 0; i < count; i++)
        if (memcmp(a + (size_t)i * size, b + (size_t)i * size, size) != 0)
            return i;
    return -1;
}

int64_t bench_stream_compare(const bench_stream *stream, int64_t first, int64_t count,
                             const void *data)
{
    _Alignas(8) char expected[PIECE * 8];
    const char *found = data;
    size_t size = fsdp_dtype_size(stream->dtype);
    for (int64_t done = 0; done < count;) {
        int64_t n = count - done < PIECE ? count - done : PIECE;
        bench_stream_fill(stream, first + done, n, expected);
        if (memcmp(expected, found + (size_t)done * size, (size_t)n * size) != 0)
            return first + done + first_difference(expected, found + (size_t)done * size, n, size);
        done += n;
    }
    return -1;
}
