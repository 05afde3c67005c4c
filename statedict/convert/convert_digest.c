/*
 * Digests of the files that a conversion made, as sha256sum computes them, for publishing beside the files
 * and for programs that know nothing of checkpoints. The files are read again, several at a time.
 */
#include "statedict/convert/convert_io.h"

#include "base/core/mem.h"
#include "base/core/pool.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/transfer/pipeline.h"
#include "kernels/digest.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_BYTES = 256 << 10, DEEPEST = 8 };

typedef struct made_file {
    const char *path, *name; /* name: relative to the directory of the result */
    int64_t size;
    uint8_t digest[FSDP_SHA256_SIZE];
} made_file;

typedef struct digesting {
    fsdp_io *io;
    fsdp_arena arena;
    made_file *items;
    size_t count, room;
    size_t parent_size; /* length of that directory's path, which names lack */
    fsdp_meter meter;
} digesting;

/* --- listing files ---------------------------------------------------------------------------- */

static fsdp_status add_path(digesting *all, const char *path, int depth, fsdp_error *err);

static fsdp_status add_directory(digesting *all, const char *path, int depth, fsdp_error *err)
{
    fsdp_io_names names;
    if (depth == DEEPEST)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "'%s': folders nested deeper than %d", path,
                         DEEPEST);
    FSDP_TRY(fsdp_io_list_names(all->io, path, NULL, NULL, &names, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < names.count && st == FSDP_OK; i++) {
        char *inside = fsdp_path_join(path, names.items[i]);
        st = inside ? add_path(all, inside, depth + 1, err) : fsdp_fail_memory(err, path);
        fsdp_free(inside);
    }
    fsdp_io_names_release(&names);
    return st;
}

static fsdp_status add_path(digesting *all, const char *path, int depth, fsdp_error *err)
{
    fsdp_file_info info;
    int result = all->io->ops->info(all->io, path, &info);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot look at '%s'", path);
    if (info.kind == FSDP_FILE_DIRECTORY)
        return add_directory(all, path, depth, err);
    made_file file = {.path = fsdp_arena_strndup(&all->arena, path, strlen(path)),
                      .size = info.size};
    if (!file.path || !fsdp_grow(&all->items, &all->room, all->count + 1, sizeof *all->items))
        return fsdp_fail_memory(err, path);
    file.name = file.path + all->parent_size;
    all->items[all->count++] = file;
    return FSDP_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const made_file *)a)->name, ((const made_file *)b)->name);
}

/* For a result "a/b/", names begin with "b/". */
static fsdp_status list_files(digesting *all, const char *to, fsdp_error *err)
{
    size_t size = strlen(to);
    while (size > 1 && to[size - 1] == '/')
        size--;
    size_t last = size;
    while (last > 0 && to[last - 1] != '/')
        last--;
    all->parent_size = last;
    const char *path = fsdp_arena_strndup(&all->arena, to, size);
    if (!path)
        return fsdp_fail_memory(err, to);
    FSDP_TRY(add_path(all, path, 0, err));
    if (all->count > 0)
        qsort(all->items, all->count, sizeof *all->items, by_name);
    return FSDP_OK;
}

/* --- their digests ---------------------------------------------------------------------------- */

static fsdp_status digest_open(digesting *all, made_file *made, fsdp_file *file, char *piece,
                               fsdp_error *err)
{
    fsdp_sha256 sha;
    fsdp_sha256_init(&sha);
    for (int64_t done = 0; done < made->size;) {
        int64_t rest = made->size - done, n = rest < PIECE_BYTES ? rest : PIECE_BYTES;
        FSDP_TRY(fsdp_io_read(file, made->path, piece, (size_t)n, done, err));
        fsdp_sha256_add(&sha, piece, (size_t)n);
        done += n;
        FSDP_TRY(fsdp_meter_add(&all->meter, n, made->name, strlen(made->name), err));
    }
    fsdp_sha256_value(&sha, made->digest);
    return FSDP_OK;
}

static fsdp_status digest_file(void *user, size_t number, fsdp_error *err)
{
    digesting *all = user;
    made_file *made = &all->items[number];
    fsdp_file *file = NULL;
    FSDP_TRY(fsdp_io_open(all->io, made->path, FSDP_IO_READ | FSDP_IO_BENEATH, &file, err));
    char *piece = fsdp_alloc_pages(PIECE_BYTES);
    fsdp_status st = piece ? digest_open(all, made, file, piece, err)
                           : fsdp_fail_memory(err, "the digest of a file");
    fsdp_free(piece);
    (void)fsdp_io_close(&file, made->path, NULL); /* only read: no data can be lost */
    return st;
}

static fsdp_status digest_all(digesting *all, const char *to, const fsdp_convert_opts *opts,
                              fsdp_error *err)
{
    int64_t bytes = 0, memory = opts->memory > 0 ? opts->memory : FSDP_MEMORY_DEFAULT;
    int threads = opts->threads > 0 ? opts->threads : fsdp_pool_cores();
    if (threads > memory / PIECE_BYTES)
        threads = memory < PIECE_BYTES ? 1 : (int)(memory / PIECE_BYTES);
    FSDP_TRY(list_files(all, to, err));
    for (size_t i = 0; i < all->count; i++)
        bytes += all->items[i].size;
    fsdp_meter_init(&all->meter, &opts->watch, bytes);
    return fsdp_parallel(threads, all->count, digest_file, all, err);
}

fsdp_status fsdp_convert_digests(const char *to, const fsdp_convert_opts *opts,
                                 fsdp_file_digest_visit visit, void *user, fsdp_error *err)
{
    fsdp_convert_io how;
    fsdp_status st = fsdp_convert_io_begin(&how, opts, err);
    digesting all = {.io = fsdp_access_io(&how.opts.open.access)};
    if (st == FSDP_OK)
        st = digest_all(&all, to, &how.opts, err);
    for (size_t i = 0; i < all.count && st == FSDP_OK; i++)
        visit(user, all.items[i].name, all.items[i].digest);
    fsdp_free(all.items);
    fsdp_arena_release(&all.arena);
    fsdp_convert_io_end(&how);
    return st;
}
