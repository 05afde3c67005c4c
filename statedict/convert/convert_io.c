/* File operations of a conversion: see convert_io.h. */
#include "statedict/convert/convert_io.h"
#include "statedict/convert/convert_job.h"

#include "base/io/io_cache.h"
#include "base/io/io_direct.h"
#include "base/io/io_limit.h"
#include "base/core/pool.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/transfer/pipeline.h"

#include <inttypes.h>

enum { DIRECT_MOST = 16 << 20, BUFFER_MOST = 1 << 20, BUFFER_LEAST = 64 << 10 };

fsdp_status fsdp_convert_open(const char *from, const fsdp_convert_opts *opts,
                              fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    fsdp_open_opts open = opts->open;
    open.whole = fsdp_convert_takes_whole(opts);
    open.memory = opts->memory;
    open.watch = &opts->watch;
    FSDP_TRY(fsdp_checkpoint_open(from, &open, checkpoint_out, err));
    bool is_empty = fsdp_sd_count((*checkpoint_out)->manifest.sd) == 0;
    if (!is_empty || fsdp_checkpoint_missing_count(*checkpoint_out) == 0)
        return FSDP_OK;
    fsdp_checkpoint_close(*checkpoint_out);
    *checkpoint_out = NULL;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' lacks all files with data", from);
}

static int threads_of(const fsdp_convert_opts *opts)
{
    return opts->threads > 0 ? opts->threads : fsdp_pool_cores();
}

static int64_t direct_buffer(const fsdp_convert_opts *opts)
{
    int64_t buffer = DIRECT_MOST / threads_of(opts);
    return buffer < BUFFER_LEAST ? BUFFER_LEAST : buffer > BUFFER_MOST ? BUFFER_MOST : buffer;
}

int64_t fsdp_convert_io_room(const fsdp_convert_opts *opts)
{
    return opts && opts->direct ? direct_buffer(opts) * threads_of(opts) : 0;
}

static fsdp_status make_io(fsdp_convert_io *how, fsdp_error *err)
{
    fsdp_convert_opts *opts = &how->opts;
    fsdp_io *io = fsdp_access_io(&opts->open.access);
    if (opts->bytes_per_second > 0) {
        fsdp_io_limit_opts limit = {.bytes_per_second = opts->bytes_per_second,
                                    .stopped = opts->watch.stopped,
                                    .context = opts->watch.context};
        FSDP_TRY(fsdp_io_limit_create(io, &limit, &how->limit, err));
        io = how->limit;
    }
    if (opts->direct) {
        FSDP_TRY(fsdp_io_direct_create(io, (size_t)direct_buffer(opts), &how->direct, err));
        io = how->direct;
    }
    FSDP_TRY(fsdp_io_cache_create(io, &how->cache, err));
    opts->open.access.disk = how->cache;
    return FSDP_OK;
}

fsdp_status fsdp_convert_io_begin(fsdp_convert_io *how, const fsdp_convert_opts *opts,
                                  fsdp_error *err)
{
    *how = (fsdp_convert_io){.opts = opts ? *opts : (fsdp_convert_opts){0}};
    if (how->opts.bytes_per_second < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%" PRId64 " bytes a second is not a valid rate",
                         how->opts.bytes_per_second);
    return make_io(how, err);
}

void fsdp_convert_io_end(fsdp_convert_io *how)
{
    if (how->direct && fsdp_io_direct_refusals(how->direct) > 0)
        fsdp_notice(&how->opts.watch,
                    "the file system cannot bypass the page cache: its files were read through it");
    fsdp_io_cache_free(how->cache);
    fsdp_io_direct_free(how->direct);
    fsdp_io_limit_free(how->limit);
}

fsdp_status fsdp_convert_file_code(const char *path, const fsdp_access *access, fsdp_text *names,
                                   fsdp_error *err)
{
    const fsdp_open_opts open = {.access = *access};
    fsdp_checkpoint *checkpoint = NULL;
    const char *name;
    fsdp_error odd = {0};
    fsdp_status st = fsdp_checkpoint_open(path, &open, &checkpoint, &odd);
    if (st == FSDP_ERR_LIMIT)
        return fsdp_fail(err, st, "%s", odd.text);
    if (st != FSDP_OK || !checkpoint->source)
        fsdp_text_addf(names, "not understood");
    for (size_t file = 0;
         st == FSDP_OK && checkpoint->source && file < fsdp_source_file_count(checkpoint->source);
         file++)
        for (size_t n = 0; (name = fsdp_source_code_at(checkpoint->source, file, n)) != NULL; n++)
            fsdp_text_addf(names, "%s%s", names->size > 0 ? ", " : "", name);
    fsdp_checkpoint_close(checkpoint);
    return names->failed ? fsdp_fail_memory(err, path) : FSDP_OK;
}
