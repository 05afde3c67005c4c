/* Lists files and computes their digests: see file_list.h. */
#include "statedict/checkpoint/file_list.h"

#include "base/core/mem.h"
#include "base/core/pool.h"
#include "kernels/kernels.h"
#include "statedict/sd/meter.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_BYTES = 256 << 10, DEEPEST = 8 };

/* --- listing files ---------------------------------------------------------------------------- */

void fsdp_file_list_release(fsdp_file_list *list)
{
    fsdp_free(list->items);
    fsdp_arena_release(&list->arena);
    *list = (fsdp_file_list){.io = list->io};
}

fsdp_status fsdp_file_list_add(fsdp_file_list *list, const char *path, const char *name,
                               int64_t size, fsdp_error *err)
{
    fsdp_listed_file file = {.path = fsdp_arena_strndup(&list->arena, path, strlen(path)),
                             .name = fsdp_arena_strndup(&list->arena, name, strlen(name)),
                             .size = size};
    if (!file.path || !file.name ||
        !fsdp_grow(&list->items, &list->room, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, path);
    list->items[list->count++] = file;
    return FSDP_OK;
}

typedef struct tree_walk {
    fsdp_file_list *list;
    size_t prefix_size;
    bool (*wanted)(void *context, const char *name);
} tree_walk;

static fsdp_status add_path(const tree_walk *walk, const char *path, int depth, fsdp_error *err);

static fsdp_status add_directory(const tree_walk *walk, const char *path, int depth,
                                 fsdp_error *err)
{
    fsdp_io_names names;
    if (depth == DEEPEST)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "'%s': folders are nested more than %d deep", path,
                         DEEPEST);
    FSDP_TRY(fsdp_io_list_names(walk->list->io, path, walk->wanted, NULL, &names, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < names.count && st == FSDP_OK; i++) {
        char *inside = fsdp_path_join(path, names.items[i]);
        st = inside ? add_path(walk, inside, depth + 1, err) : fsdp_fail_memory(err, path);
        fsdp_free(inside);
    }
    fsdp_io_names_release(&names);
    return st;
}

static bool is_link(fsdp_io *io, const char *path)
{
    fsdp_file *file = NULL;
    int result = io->ops->open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file);
    (void)fsdp_io_close(&file, path, NULL); /* only opened */
    return result == -ELOOP;
}

static fsdp_status add_path(const tree_walk *walk, const char *path, int depth, fsdp_error *err)
{
    fsdp_file_info info;
    fsdp_io *io = walk->list->io;
    if (depth > 0 && is_link(io, path))
        return FSDP_OK;
    int result = io->ops->info(io, path, &info);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot stat '%s'", path);
    if (info.kind == FSDP_FILE_DIRECTORY)
        return add_directory(walk, path, depth, err);
    if (info.kind != FSDP_FILE_REGULAR)
        return FSDP_OK;
    return fsdp_file_list_add(walk->list, path, path + walk->prefix_size, info.size, err);
}

fsdp_status fsdp_file_list_add_tree(fsdp_file_list *list, const char *path, size_t prefix_size,
                                    bool (*wanted)(void *context, const char *name),
                                    fsdp_error *err)
{
    return add_path(&(tree_walk){list, prefix_size, wanted}, path, 0, err);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const fsdp_listed_file *)a)->name, ((const fsdp_listed_file *)b)->name);
}

void fsdp_file_list_sort(fsdp_file_list *list)
{
    size_t kept = 0;
    if (list->count > 0)
        qsort(list->items, list->count, sizeof *list->items, by_name);
    for (size_t i = 0; i < list->count; i++)
        if (kept == 0 || strcmp(list->items[kept - 1].name, list->items[i].name) != 0)
            list->items[kept++] = list->items[i];
    list->count = kept;
}

/* --- their digests ---------------------------------------------------------------------------- */

typedef struct digesting {
    fsdp_file_list *list;
    const fsdp_digest_opts *opts;
    fsdp_meter meter;
} digesting;

/* One file's hash while it is read; hasher is NULL for SHA-256. */
typedef struct file_hash {
    fsdp_sha256 sha;
    fsdp_hasher *hasher;
    char *piece;
} file_hash;

static void add_piece(file_hash *hash, size_t size)
{
    if (hash->hasher)
        fsdp_hasher_add(hash->hasher, hash->piece, size);
    else
        fsdp_sha256_add(&hash->sha, hash->piece, size);
}

static void take_digest(const file_hash *hash, uint8_t digest_out[FSDP_FILE_DIGEST])
{
    if (!hash->hasher) {
        fsdp_sha256_value(&hash->sha, digest_out);
        return;
    }
    fsdp_hash value = fsdp_hasher_value(hash->hasher);
    memset(digest_out, 0, FSDP_FILE_DIGEST);
    memcpy(digest_out, value.bytes, sizeof value.bytes);
}

static fsdp_status digest_open(digesting *all, fsdp_listed_file *listed, fsdp_file *file,
                               file_hash *hash, fsdp_error *err)
{
    for (int64_t done = 0; done < listed->size;) {
        int64_t rest = listed->size - done, n = rest < PIECE_BYTES ? rest : PIECE_BYTES;
        FSDP_TRY(fsdp_io_read(file, listed->path, hash->piece, (size_t)n, done, err));
        add_piece(hash, (size_t)n);
        done += n;
        FSDP_TRY(fsdp_meter_add(&all->meter, n, listed->name, strlen(listed->name), err));
    }
    take_digest(hash, listed->digest);
    return FSDP_OK;
}

static fsdp_status digest_file(void *context, size_t number, fsdp_error *err)
{
    digesting *all = context;
    fsdp_listed_file *listed = &all->list->items[number];
    bool is_xxh3 = all->opts->kind == FSDP_DIGEST_XXH3;
    fsdp_file *file = NULL;
    FSDP_TRY(fsdp_io_open(all->list->io, listed->path,
                          FSDP_IO_READ | (all->opts->follow_links ? 0 : FSDP_IO_BENEATH), &file,
                          err));
    file_hash hash = {.piece = fsdp_alloc_pages(PIECE_BYTES),
                      .hasher = is_xxh3 ? fsdp_hasher_create() : NULL};
    fsdp_sha256_init(&hash.sha);
    fsdp_status st = hash.piece && (hash.hasher || !is_xxh3)
                         ? digest_open(all, listed, file, &hash, err)
                         : fsdp_fail_memory(err, "the digest of a file");
    fsdp_hasher_free(hash.hasher);
    fsdp_free(hash.piece);
    (void)fsdp_io_close(&file, listed->path, NULL); /* only read: no data can be lost */
    return st;
}

fsdp_status fsdp_file_list_digest(fsdp_file_list *list, const fsdp_digest_opts *opts,
                                  fsdp_error *err)
{
    digesting all = {.list = list, .opts = opts};
    int64_t bytes = 0, memory = opts->memory > 0 ? opts->memory : FSDP_MEMORY_DEFAULT;
    int threads = opts->threads > 0 ? opts->threads : fsdp_pool_cores();
    if (threads > memory / PIECE_BYTES)
        threads = memory < PIECE_BYTES ? 1 : (int)(memory / PIECE_BYTES);
    for (size_t i = 0; i < list->count; i++)
        bytes += list->items[i].size;
    fsdp_meter_init(&all.meter, opts->watch, bytes);
    return fsdp_parallel(threads, list->count, digest_file, &all, err);
}
