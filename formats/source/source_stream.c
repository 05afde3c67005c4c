/*
 * Compressed streams of a source, which must be decoded from the beginning. A ring keeps the
 * part decoded last, so that threads that read forwards share one decode. A reader that goes
 * back further restarts the stream; after some restarts it is spooled into an unnamed file, or
 * at the first read when fsdp_source_announce expects that. Checks of streams and of other bytes
 * that have a checksum stand here too.
 */
#include "formats/source/source_internal.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

enum { FSDP_READER_BYTES = 1 << 20 };
enum { INPUT_BYTES = 128 << 10, LEAST_RING = 64 << 10, FREE_RESTARTS = 2 };

struct packed_stream {
    fsdp_source_stream where;
    pthread_mutex_t lock; /* held during reads; source->lock is taken inside it */
    uint8_t *ring;        /* the bytes decoded last: byte n lies at n % room */
    int64_t room;
    int64_t decoded;
    int64_t fed; /* stored bytes that were copied into input */
    uint8_t *input;
    const uint8_t *next_in;
    size_t in_left;
    z_stream inflate;
    ZSTD_DStream *zstd;
    bool is_decoding;
    bool has_ended; /* the decoder reached its end */
    uint32_t crc;
    int restarts;
    bool is_for_spool; /* announced: it would be decoded many times over */
    uint64_t turn;     /* number of its last use */
    fsdp_file *spool;
    char *spool_path; /* for messages: the file has no name any more */
};

fsdp_status fsdp_reader_prepare(fsdp_source_reader *reader, fsdp_error *err)
{
    if (reader->buf)
        return FSDP_OK;
    reader->buf = fsdp_alloc_pages(FSDP_READER_BYTES);
    if (!reader->buf)
        return fsdp_fail_memory(err, "a reader's buffer");
    reader->size = FSDP_READER_BYTES;
    return FSDP_OK;
}

fsdp_status fsdp_reader_count(fsdp_source_reader *reader, int64_t bytes, const char *what,
                              fsdp_error *err)
{
    if (!reader)
        return FSDP_OK;
    reader->bytes_read += bytes;
    return reader->count ? reader->count(reader->context, bytes, what, err) : FSDP_OK;
}

int64_t fsdp_source_stream_size(const fsdp_source *source, int stream)
{
    return source->streams[stream]->where.size;
}

const fsdp_source_stream *fsdp_source_stream_at(const fsdp_source *source, size_t stream)
{
    return &source->streams[stream]->where;
}

/* Requests a spool file, which the first read makes. */
static void packed_expect_spool(packed_stream *stream)
{
    stream->is_for_spool = true;
}

static bool packed_is_for_spool(const packed_stream *stream)
{
    return stream->is_for_spool;
}

void fsdp_source_set_memory(fsdp_source *source, int64_t memory, const char *directory)
{
    source->stream_memory = memory;
    fsdp_free(source->spool_directory);
    source->spool_directory = directory ? fsdp_strndup(directory, strlen(directory)) : NULL;
}

int64_t fsdp_source_memory(const fsdp_source *source)
{
    return source->stream_memory;
}

static fsdp_status fail_stream(const fsdp_source *source, const packed_stream *stream,
                               const char *what, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the packed bytes %" PRId64 " to %" PRId64 " %s",
                     source->files[stream->where.file].path, stream->where.offset,
                     stream->where.offset + stream->where.stored, what);
}

/* --- beginning and end of a decode ------------------------------------------------------------ */

static void stop_decoding(fsdp_source *source, packed_stream *stream)
{
    if (!stream->is_decoding)
        return;
    if (stream->where.packing == FSDP_PACKING_DEFLATE)
        inflateEnd(&stream->inflate);
    else
        ZSTD_freeDStream(stream->zstd);
    stream->zstd = NULL;
    fsdp_free(stream->input);
    fsdp_free(stream->ring);
    stream->input = stream->ring = NULL;
    stream->is_decoding = false;
    stream->decoded = 0;
    source->stream_used -= stream->room;
}

/* Frees rings of streams without readers, the least recently used first. Called with
 * source->lock held. */
static void make_room(fsdp_source *source, const packed_stream *owner, int64_t wanted)
{
    while (source->stream_used > source->stream_memory - wanted) {
        packed_stream *oldest = NULL;
        for (size_t i = 0; i < source->stream_count; i++) {
            packed_stream *other = source->streams[i];
            if (other == owner || (oldest && oldest->turn <= other->turn) ||
                pthread_mutex_trylock(&other->lock) != 0)
                continue;
            bool is_better = other->is_decoding;
            if (is_better && oldest)
                pthread_mutex_unlock(&oldest->lock);
            if (is_better)
                oldest = other;
            else
                pthread_mutex_unlock(&other->lock);
        }
        if (!oldest)
            return;
        stop_decoding(source, oldest);
        oldest->restarts++; /* its next read restarts it */
        pthread_mutex_unlock(&oldest->lock);
    }
}

/* Bytes of memory for decoding: the whole stream, or a ring of its last bytes. */
static int64_t packed_room(const fsdp_source *source, const packed_stream *stream)
{
    int64_t most = source->stream_memory / 4;
    if (most < LEAST_RING)
        most = LEAST_RING;
    if (stream->where.size >= 0 && most > stream->where.size)
        most = stream->where.size > 0 ? stream->where.size : 1;
    return most;
}

static bool init_decoder(packed_stream *stream)
{
    if (stream->where.packing == FSDP_PACKING_ZSTD) {
        stream->zstd = ZSTD_createDStream();
        return stream->zstd != NULL;
    }
    stream->inflate = (z_stream){0};
    return inflateInit2(&stream->inflate, -MAX_WBITS) == Z_OK;
}

static fsdp_status start_decoding(fsdp_source *source, packed_stream *stream, fsdp_error *err)
{
    pthread_mutex_lock(&source->lock);
    stream->room = packed_room(source, stream);
    make_room(source, stream, stream->room);
    source->stream_used += stream->room;
    pthread_mutex_unlock(&source->lock);
    stream->input = fsdp_realloc(NULL, INPUT_BYTES, 1);
    stream->ring = fsdp_alloc_pages((size_t)stream->room);
    stream->fed = stream->decoded = 0;
    stream->in_left = 0;
    stream->has_ended = false;
    stream->crc = 0;
    if (stream->input && stream->ring && init_decoder(stream)) {
        stream->is_decoding = true;
        return FSDP_OK;
    }
    fsdp_free(stream->input);
    fsdp_free(stream->ring);
    stream->input = stream->ring = NULL;
    pthread_mutex_lock(&source->lock);
    source->stream_used -= stream->room;
    pthread_mutex_unlock(&source->lock);
    return fsdp_fail_memory(err, "a decoder");
}

static void restart(fsdp_source *source, packed_stream *stream)
{
    pthread_mutex_lock(&source->lock);
    stop_decoding(source, stream);
    pthread_mutex_unlock(&source->lock);
}

void fsdp_packed_free(packed_stream *stream)
{
    if (stream->is_decoding) {
        if (stream->where.packing == FSDP_PACKING_DEFLATE)
            inflateEnd(&stream->inflate);
        ZSTD_freeDStream(stream->zstd);
        fsdp_free(stream->input);
        fsdp_free(stream->ring);
    }
    (void)fsdp_io_close(&stream->spool, stream->spool_path, NULL); /* no reader needs it any more */
    fsdp_free(stream->spool_path);
    pthread_mutex_destroy(&stream->lock);
}

/* --- decoding --------------------------------------------------------------------------------- */

static fsdp_status feed(fsdp_source *source, packed_stream *stream, fsdp_error *err)
{
    if (stream->in_left > 0 || stream->fed == stream->where.stored)
        return FSDP_OK;
    int64_t left = stream->where.stored - stream->fed;
    size_t size = left < INPUT_BYTES ? (size_t)left : INPUT_BYTES;
    FSDP_TRY(fsdp_source_pread(source, stream->where.file, stream->input, size,
                               stream->where.offset + stream->fed, err));
    stream->fed += (int64_t)size;
    stream->next_in = stream->input;
    stream->in_left = size;
    return FSDP_OK;
}

/* One call of zlib; false when the bytes are not a deflate stream. */
static bool inflate_some(packed_stream *stream, uint8_t *to, size_t room, size_t *made_out)
{
    z_stream *z = &stream->inflate;
    z->next_in = (Bytef *)(uintptr_t)stream->next_in;
    z->avail_in = (uInt)stream->in_left;
    z->next_out = to;
    z->avail_out = (uInt)room;
    int result = inflate(z, Z_NO_FLUSH);
    stream->next_in += stream->in_left - z->avail_in;
    stream->in_left = z->avail_in;
    *made_out = room - z->avail_out;
    stream->has_ended = result == Z_STREAM_END;
    return result == Z_OK || result == Z_STREAM_END || result == Z_BUF_ERROR;
}

/* One call of zstd. A further frame may follow the end of one. */
static bool unzstd_some(packed_stream *stream, uint8_t *to, size_t room, size_t *made_out)
{
    ZSTD_inBuffer in = {.src = stream->next_in, .size = stream->in_left};
    ZSTD_outBuffer out = {.dst = to, .size = room};
    size_t result = ZSTD_decompressStream(stream->zstd, &out, &in);
    stream->next_in += in.pos;
    stream->in_left -= in.pos;
    *made_out = out.pos;
    bool is_all = stream->in_left == 0 && stream->fed == stream->where.stored;
    stream->has_ended = result == 0 && is_all;
    return !ZSTD_isError(result);
}

/* Decodes up to room bytes; 0 at the end of the stream. */
static fsdp_status decode_some(fsdp_source *source, packed_stream *stream, uint8_t *to, size_t room,
                               size_t *made_out, fsdp_error *err)
{
    *made_out = 0;
    while (*made_out == 0 && !stream->has_ended) {
        FSDP_TRY(feed(source, stream, err));
        size_t before = stream->in_left;
        bool is_fine = stream->where.packing == FSDP_PACKING_DEFLATE
                           ? inflate_some(stream, to, room, made_out)
                           : unzstd_some(stream, to, room, made_out);
        if (!is_fine)
            return fail_stream(source, stream, "cannot be decoded", err);
        bool is_stuck = *made_out == 0 && stream->in_left == before && !stream->has_ended;
        if (is_stuck && stream->in_left == 0 && stream->fed == stream->where.stored)
            return fail_stream(source, stream, "end too early", err);
        if (is_stuck && stream->in_left > 0)
            return fail_stream(source, stream, "cannot be decoded", err);
    }
    return FSDP_OK;
}

/* At the end of the bytes: the decoder must be at its end, and the CRC must match. */
static fsdp_status check_end(fsdp_source *source, packed_stream *stream, fsdp_error *err)
{
    uint8_t more;
    size_t made;
    FSDP_TRY(decode_some(source, stream, &more, 1, &made, err));
    if (made > 0)
        return fail_stream(source, stream, "decode to more bytes than declared", err);
    if (stream->in_left > 0 || stream->fed < stream->where.stored)
        return fail_stream(source, stream, "have bytes after their end", err);
    if (stream->where.has_crc && stream->crc != stream->where.crc)
        return fail_stream(source, stream, "do not have the CRC-32 that was stored", err);
    return FSDP_OK;
}

/* Decodes the next bytes into the ring, as many as fit before its end. */
static fsdp_status advance(fsdp_source *source, packed_stream *stream, fsdp_error *err)
{
    int64_t at = stream->decoded % stream->room;
    int64_t space = stream->room - at;
    if (space > stream->where.size - stream->decoded)
        space = stream->where.size - stream->decoded;
    if (space > INPUT_BYTES)
        space = INPUT_BYTES;
    size_t made = 0;
    if (space > 0)
        FSDP_TRY(decode_some(source, stream, stream->ring + at, (size_t)space, &made, err));
    if (space > 0 && made == 0)
        return fail_stream(source, stream, "decode to fewer bytes than declared", err);
    if (stream->where.has_crc)
        stream->crc = fsdp_crc32(stream->crc, stream->ring + at, made);
    stream->decoded += (int64_t)made;
    return stream->decoded == stream->where.size ? check_end(source, stream, err) : FSDP_OK;
}

/* --- the spool -------------------------------------------------------------------------------- */

static fsdp_status create_spool(fsdp_source *source, packed_stream *stream, fsdp_error *err)
{
    static _Atomic unsigned counter;
    const char *directory = source->spool_directory ? source->spool_directory : getenv("TMPDIR");
    char name[64];
    snprintf(name, sizeof name, ".fsdp-spool-%ld-%u", (long)getpid(), counter++);
    fsdp_free(stream->spool_path);
    stream->spool_path = fsdp_path_join(directory && *directory ? directory : "/tmp", name);
    if (!stream->spool_path)
        return fsdp_fail_memory(err, name);
    FSDP_TRY(fsdp_io_open(source->io, stream->spool_path, FSDP_IO_CREATE, &stream->spool, err));
    int result = source->io->ops->unlink(source->io, stream->spool_path);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot remove '%s'", stream->spool_path);
    return FSDP_OK;
}

/* Decodes the next bytes for a check; reader NULL: for another purpose. */
static fsdp_status advance_check(fsdp_source *source, packed_stream *stream,
                                 fsdp_source_reader *reader, fsdp_error *err)
{
    int64_t from = stream->decoded;
    FSDP_TRY(advance(source, stream, err));
    return fsdp_reader_count(reader, stream->decoded - from, source->files[stream->where.file].path,
                             err);
}

static fsdp_status fill_spool(fsdp_source *source, packed_stream *stream,
                              fsdp_source_reader *reader, fsdp_error *err)
{
    while (stream->decoded < stream->where.size) {
        int64_t from = stream->decoded;
        FSDP_TRY(advance_check(source, stream, reader, err));
        FSDP_TRY(fsdp_io_write(stream->spool, stream->spool_path,
                               stream->ring + from % stream->room, (size_t)(stream->decoded - from),
                               from, err));
    }
    return FSDP_OK;
}

static fsdp_status spool(fsdp_source *source, packed_stream *stream, fsdp_source_reader *reader,
                         fsdp_error *err)
{
    restart(source, stream);
    fsdp_status status = start_decoding(source, stream, err);
    if (status == FSDP_OK)
        status = create_spool(source, stream, err);
    if (status == FSDP_OK)
        status = fill_spool(source, stream, reader, err);
    restart(source, stream);
    if (status != FSDP_OK)
        (void)fsdp_io_close(&stream->spool, stream->spool_path, NULL); /* the first error counts */
    return status;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* Ensures that the byte at offset is in the ring, or the stream in a spool file. */
static fsdp_status seek(fsdp_source *source, packed_stream *stream, int64_t offset, fsdp_error *err)
{
    if (stream->is_for_spool)
        return spool(source, stream, NULL, err);
    int64_t kept = stream->decoded < stream->room ? stream->decoded : stream->room;
    if (stream->is_decoding && offset < stream->decoded - kept) {
        if (stream->restarts++ >= FREE_RESTARTS)
            return spool(source, stream, NULL, err);
        restart(source, stream);
    }
    if (!stream->is_decoding && stream->restarts > FREE_RESTARTS)
        return spool(source, stream, NULL, err);
    if (!stream->is_decoding)
        FSDP_TRY(start_decoding(source, stream, err));
    while (stream->decoded <= offset) {
        fsdp_status status = advance(source, stream, err);
        if (status != FSDP_OK) {
            restart(source, stream); /* a decoder must not be called again after a failure */
            return status;
        }
    }
    return FSDP_OK;
}

static fsdp_status read_locked(fsdp_source *source, packed_stream *stream, uint8_t *data,
                               size_t size, int64_t offset, fsdp_error *err)
{
    while (size > 0) {
        if (!stream->spool)
            FSDP_TRY(seek(source, stream, offset, err));
        if (stream->spool)
            return fsdp_io_read(stream->spool, stream->spool_path, data, size, offset, err);
        int64_t at = offset % stream->room;
        int64_t piece = stream->decoded - offset;
        if (piece > stream->room - at)
            piece = stream->room - at;
        if ((uint64_t)piece > size)
            piece = (int64_t)size;
        memcpy(data, stream->ring + at, (size_t)piece);
        data += piece;
        offset += piece;
        size -= (size_t)piece;
    }
    return FSDP_OK;
}

fsdp_status fsdp_source_stream_pread(fsdp_source *source, int number, void *data, size_t size,
                                     int64_t offset, fsdp_error *err)
{
    if (number < 0 || number >= (int)source->stream_count)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a read asks for a stream that was not added");
    packed_stream *stream = source->streams[number];
    if (offset < 0 || offset > stream->where.size || (uint64_t)(stream->where.size - offset) < size)
        return fail_stream(source, stream, "are shorter than what is read from them", err);
    pthread_mutex_lock(&stream->lock);
    pthread_mutex_lock(&source->lock);
    stream->turn = ++source->stream_turn;
    pthread_mutex_unlock(&source->lock);
    fsdp_status status = read_locked(source, stream, data, size, offset, err);
    pthread_mutex_unlock(&stream->lock);
    return status;
}

static fsdp_status check_locked(fsdp_source *source, packed_stream *stream,
                                fsdp_source_reader *reader, fsdp_error *err)
{
    fsdp_status status = FSDP_OK;
    if (stream->is_for_spool && !stream->spool)
        return spool(source, stream, reader, err); /* it checks the bytes as it decodes */
    if (stream->spool || (stream->is_decoding && stream->decoded == stream->where.size))
        return FSDP_OK;
    if (!stream->is_decoding)
        status = start_decoding(source, stream, err);
    if (status == FSDP_OK && stream->where.size == 0)
        status = check_end(source, stream, err);
    while (status == FSDP_OK && stream->decoded < stream->where.size)
        status = advance_check(source, stream, reader, err);
    if (status != FSDP_OK || stream->where.size == 0)
        restart(source, stream);
    return status;
}

/* Decodes to the end, so that size and CRC are checked. */
static fsdp_status check_stream(fsdp_source *source, int number, fsdp_source_reader *reader,
                                fsdp_error *err)
{
    packed_stream *stream = source->streams[number];
    fsdp_source_reader uncounted = {0};
    reader = reader ? reader : &uncounted;
    int64_t before = reader->bytes_read;
    pthread_mutex_lock(&stream->lock);
    fsdp_status status = check_locked(source, stream, reader, err);
    pthread_mutex_unlock(&stream->lock);
    if (status != FSDP_OK)
        return status;
    int64_t decoded_before = stream->where.size - (reader->bytes_read - before);
    return fsdp_reader_count(reader, decoded_before, source->files[stream->where.file].path, err);
}

void fsdp_source_count_checked(fsdp_source *source, int64_t bytes)
{
    atomic_fetch_add(&source->checked_bytes, bytes);
}

int64_t fsdp_source_checked_bytes(const fsdp_source *source)
{
    int64_t bytes = source->ops.checked_bytes ? source->ops.checked_bytes(source->state) : 0;
    return bytes + atomic_load(&source->checked_bytes);
}

static fsdp_status check_crc(fsdp_source *source, const fsdp_source_crc *check,
                             fsdp_source_reader *reader, fsdp_error *err)
{
    FSDP_TRY(fsdp_reader_prepare(reader, err));
    uint32_t crc = 0;
    for (int64_t done = 0; done < check->size;) {
        int64_t left = check->size - done;
        size_t size = left < FSDP_READER_BYTES ? (size_t)left : FSDP_READER_BYTES;
        FSDP_TRY(
            fsdp_source_pread(source, check->file, reader->buf, size, check->offset + done, err));
        crc = fsdp_crc32(crc, reader->buf, size);
        done += (int64_t)size;
        FSDP_TRY(fsdp_reader_count(reader, (int64_t)size, check->what, err));
    }
    if (crc == check->crc)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': %s, bytes %" PRId64 " to %" PRId64
                     ", has CRC-32 %08x, and %08x was stored",
                     source->files[check->file].path, check->what, check->offset,
                     check->offset + check->size, crc, check->crc);
}

size_t fsdp_source_check_count(const fsdp_source *source)
{
    size_t checks = source->ops.check_count ? source->ops.check_count(source->state) : 0;
    return source->check_count + source->stream_count + checks;
}

int64_t fsdp_source_check_bytes(const fsdp_source *source)
{
    int64_t bytes = source->ops.check_bytes ? source->ops.check_bytes(source->state) : 0;
    bool fits = true;
    for (size_t i = 0; i < source->check_count; i++)
        fits = fits && !__builtin_add_overflow(bytes, source->checks[i].size, &bytes);
    for (size_t i = 0; i < source->stream_count; i++)
        fits = fits && !__builtin_add_overflow(bytes, source->streams[i]->where.size, &bytes);
    return fits && bytes < FSDP_SOURCE_CHECK_MOST ? bytes : FSDP_SOURCE_CHECK_MOST;
}

fsdp_status fsdp_source_check(fsdp_source *source, size_t number, fsdp_source_reader *reader,
                              fsdp_error *err)
{
    if (number < source->check_count)
        return check_crc(source, &source->checks[number], reader, err);
    number -= source->check_count;
    if (number < source->stream_count)
        return check_stream(source, (int)number, reader, err);
    return source->ops.check(source->state, number - source->stream_count, reader, err);
}

/* --- for formats ------------------------------------------------------------------------------ */

static bool is_bomb(const packed_stream *stream, int64_t size)
{
    return size > FSDP_SOURCE_LARGE && size / FSDP_SOURCE_RATIO > stream->where.stored;
}

static fsdp_status fail_bomb(const fsdp_source *source, const packed_stream *stream,
                             fsdp_error *err)
{
    fail_stream(source, stream, "decode to over 4 GiB and over 1,000 times their stored size", err);
    if (err)
        err->status = FSDP_ERR_REFUSED;
    return FSDP_ERR_REFUSED;
}

/* Decodes a stream of unknown size to measure it. */
static fsdp_status measure(fsdp_source *source, packed_stream *stream, fsdp_error *err)
{
    FSDP_TRY(start_decoding(source, stream, err));
    fsdp_status status = FSDP_OK;
    int64_t size = 0;
    for (size_t made = 1; made > 0 && status == FSDP_OK;) {
        size_t room = stream->room < INPUT_BYTES ? (size_t)stream->room : INPUT_BYTES;
        status = decode_some(source, stream, stream->ring, room, &made, err);
        size += (int64_t)made;
        if (is_bomb(stream, size))
            status = fail_bomb(source, stream, err);
    }
    restart(source, stream);
    stream->where.size = size;
    return status;
}

fsdp_status fsdp_source_add_stream(fsdp_source *source, const fsdp_source_stream *where,
                                   int *number_out, fsdp_error *err)
{
    if (where->file < 0 || where->file >= (int)source->file_count)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a stream is in a file that was not added");
    packed_stream *stream = fsdp_arena_alloc(&source->arena, 1, sizeof *stream);
    if (!stream || source->stream_count >= INT32_MAX ||
        !fsdp_grow(&source->streams, &source->stream_room, source->stream_count + 1,
                   sizeof *source->streams))
        return fsdp_fail_memory(err, "the streams of a checkpoint");
    stream->where = *where;
    int64_t size = source->files[where->file].info.size;
    if (where->offset < 0 || where->stored < 0 || where->offset > size ||
        where->stored > size - where->offset || where->size < -1)
        return fail_stream(source, stream, "extend past the end of the file", err);
    if (is_bomb(stream, where->size))
        return fail_bomb(source, stream, err);
    pthread_mutex_init(&stream->lock, NULL);
    if (where->has_crc)
        fsdp_source_count_checked(source, where->stored);
    source->streams[source->stream_count] = stream;
    *number_out = (int)source->stream_count++;
    return where->size < 0 ? measure(source, stream, err) : FSDP_OK;
}

/* === streams that are spooled ================================================================= */

/*
 * Decides which compressed streams are spooled. It does so before the first read, so that a plan
 * can report them and count the disk space. A stream is decoded forwards only: a reader that
 * needs another order, or the same bytes again, and does not find them in memory would decode
 * the stream many times over.
 */

/* True when its elements lie in the stream in the order of the box. */
static bool is_in_order(const fsdp_source_chunk *chunk, int ndim)
{
    int64_t last = INT64_MAX;
    for (int d = 0; chunk->strides && d < ndim; d++) {
        if (chunk->len[d] < 2)
            continue;
        if (chunk->strides[d] < 0 || chunk->strides[d] > last)
            return false;
        last = chunk->strides[d];
    }
    return true;
}

/* True when no element of another chunk lies between its first and last element. */
static bool is_run(const fsdp_source_chunk *chunk, const fsdp_source_tensor *tensor)
{
    bool is_cut = false;
    for (int d = tensor->ndim - 1; d >= 0; d--) {
        if (is_cut && chunk->len[d] > 1)
            return false;
        is_cut = is_cut || chunk->len[d] < tensor->shape[d];
    }
    return true;
}

static packed_stream *stream_of(const fsdp_source *source, const fsdp_source_chunk *chunk)
{
    return chunk->stream == FSDP_NO_STREAM ? NULL : source->streams[chunk->stream];
}

/* Chunks side by side are decoded side by side; true when memory holds the rings of all of them. */
static bool fit_together(const fsdp_source *source, const fsdp_source_tensor *tensor)
{
    int64_t room = 0;
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        const packed_stream *stream = stream_of(source, &tensor->chunks[i]);
        if (stream && !is_run(&tensor->chunks[i], tensor))
            room += packed_room(source, stream);
        if (room > source->stream_memory)
            return false;
    }
    return true;
}

fsdp_status fsdp_source_announce(fsdp_source *source, size_t number, bool repeated, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = &source->tensors[number];
    if (source->ops.check_memory)
        FSDP_TRY(source->ops.check_memory(source->state, number, err));
    bool fit = source->stream_count == 0 || fit_together(source, tensor);
    for (size_t i = 0; source->stream_count > 0 && i < tensor->chunk_count; i++) {
        const fsdp_source_chunk *chunk = &tensor->chunks[i];
        packed_stream *stream = stream_of(source, chunk);
        if (!stream)
            continue;
        bool fits_alone = packed_room(source, stream) >= stream->where.size;
        bool again = repeated || !is_in_order(chunk, tensor->ndim);
        if ((again && !fits_alone) || (!fit && !is_run(chunk, tensor)))
            packed_expect_spool(stream);
    }
    return FSDP_OK;
}

void fsdp_source_reading_limits(const fsdp_source *source, int *threads_out, int64_t *bytes_out)
{
    *threads_out = INT_MAX;
    *bytes_out = INT64_MAX;
    for (size_t i = 0; i < source->stream_count; i++) {
        int64_t room = packed_room(source, source->streams[i]);
        int64_t together = source->stream_memory / room;
        if (room >= source->streams[i]->where.size)
            continue;
        *bytes_out = room < *bytes_out ? room : *bytes_out;
        if (together < *threads_out)
            *threads_out = together > 1 ? (int)together : 1;
    }
}

int64_t fsdp_source_spool_bytes(const fsdp_source *source)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < source->stream_count; i++) {
        if (packed_is_for_spool(source->streams[i]))
            bytes += source->streams[i]->where.size;
    }
    return bytes;
}
