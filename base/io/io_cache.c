/* The io back end that opens a file and lists a directory once: see io_cache.h. */
#include "base/io/io_cache.h"

#include "base/io/io_pass.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

/* An inner file that was opened for reading, shared by all who open the path. */
typedef struct shared_file {
    struct shared_file *next; /* in the order of their last use, the latest first */
    fsdp_file *inner;
    unsigned flags;
    int users;
    char path[];
} shared_file;

typedef struct cached_file {
    fsdp_pass_file pass;
    shared_file *shared;
} cached_file;

typedef struct listing {
    struct listing *next;
    fsdp_io_names names;
    char path[];
} listing;

typedef struct cache_io {
    fsdp_io_pass pass;
    pthread_mutex_t lock;
    bool is_ended;
    shared_file *files;
    int idle_files; /* without users */
    listing *listings;
    size_t name_count; /* of all listings */
} cache_io;

/* --- shared files ----------------------------------------------------------------------------- */

static void close_shared(shared_file *file)
{
    (void)file->inner->ops->close(file->inner); /* only read: nothing can be lost */
    fsdp_free(file);
}

/* Closes files that have no user until at most `most` of them are left, the least recent first. */
static void close_idle(cache_io *cache, int most)
{
    int passed = 0;
    for (shared_file **at = &cache->files; *at;) {
        shared_file *file = *at;
        if (file->users > 0 || passed++ < most) {
            at = &file->next;
            continue;
        }
        *at = file->next;
        cache->idle_files--;
        close_shared(file);
    }
}

static void put_first(cache_io *cache, shared_file *file)
{
    file->next = cache->files;
    cache->files = file;
}

/* Finds the path and moves it to the front. */
static shared_file *find_file(cache_io *cache, const char *path, unsigned flags)
{
    for (shared_file **at = &cache->files; *at; at = &(*at)->next) {
        shared_file *file = *at;
        if (file->flags != flags || strcmp(file->path, path) != 0)
            continue;
        *at = file->next;
        put_first(cache, file);
        return file;
    }
    return NULL;
}

/* Also closes idle files where descriptors ran out. */
static int open_shared(cache_io *cache, const char *path, unsigned flags, shared_file **file_out)
{
    fsdp_io *inner = cache->pass.inner;
    size_t size = strlen(path) + 1;
    shared_file *file = fsdp_alloc(1, sizeof *file + size);
    if (!file)
        return -ENOMEM;
    int result = inner->ops->open(inner, path, flags, &file->inner);
    if ((result == -EMFILE || result == -ENFILE) && cache->idle_files > 0) {
        close_idle(cache, 0);
        result = inner->ops->open(inner, path, flags, &file->inner);
    }
    if (result < 0) {
        fsdp_free(file);
        return result;
    }
    file->flags = flags;
    memcpy(file->path, path, size);
    put_first(cache, file);
    cache->idle_files++;
    *file_out = file;
    return 0;
}

/* A path that is not a link is opened as one that may not be, which suits both who follow links and who do
 * not. */
static int find_or_open(cache_io *cache, const char *path, unsigned flags, shared_file **shared_out)
{
    unsigned strict = flags | FSDP_IO_BENEATH;
    *shared_out = find_file(cache, path, strict);
    if (!*shared_out)
        *shared_out = find_file(cache, path, flags);
    if (*shared_out)
        return 0;
    int result = open_shared(cache, path, strict, shared_out);
    return result == -ELOOP && flags != strict ? open_shared(cache, path, flags, shared_out)
                                               : result;
}

static int open_cached(cache_io *cache, const char *path, unsigned flags, fsdp_file **file_out)
{
    cached_file *file = fsdp_alloc(1, sizeof *file);
    shared_file *shared = NULL;
    int result = file ? find_or_open(cache, path, flags, &shared) : -ENOMEM;
    if (result < 0) {
        fsdp_free(file);
        return result;
    }
    cache->idle_files -= shared->users++ == 0;
    file->pass = (fsdp_pass_file){{&cache->pass.ops}, shared->inner, &cache->pass, flags};
    file->shared = shared;
    *file_out = &file->pass.base;
    return 0;
}

static int cache_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    cache_io *cache = (cache_io *)io;
    fsdp_io *inner = cache->pass.inner;
    bool is_read = (flags & FSDP_IO_MODE) == FSDP_IO_READ && !(flags & FSDP_IO_DIRECT);
    pthread_mutex_lock(&cache->lock);
    bool is_cached = is_read && !cache->is_ended;
    int result = is_cached ? open_cached(cache, path, flags, file_out) : 0;
    pthread_mutex_unlock(&cache->lock);
    return is_cached ? result : inner->ops->open(inner, path, flags, file_out);
}

static int cache_close(fsdp_file *file)
{
    cached_file *cached = (cached_file *)file;
    cache_io *cache = (cache_io *)cached->pass.owner;
    pthread_mutex_lock(&cache->lock);
    cache->idle_files += --cached->shared->users == 0;
    close_idle(cache, cache->is_ended ? 0 : FSDP_IO_CACHE_FILES);
    pthread_mutex_unlock(&cache->lock);
    fsdp_free(cached);
    return 0;
}

/* --- listings --------------------------------------------------------------------------------- */

static listing *find_listing(const cache_io *cache, const char *path)
{
    for (listing *at = cache->listings; at; at = at->next)
        if (strcmp(at->path, path) == 0)
            return at;
    return NULL;
}

static void free_listings(cache_io *cache)
{
    while (cache->listings) {
        listing *first = cache->listings;
        cache->listings = first->next;
        fsdp_io_names_release(&first->names);
        fsdp_free(first);
    }
    cache->name_count = 0;
}

typedef struct name_search {
    fsdp_io_names *names;
    size_t most;
    bool is_cut; /* there are more, or no memory */
} name_search;

static int keep_name(void *context, const char *name)
{
    name_search *search = context;
    fsdp_io_names *names = search->names;
    char *copy = fsdp_arena_strndup(&names->arena, name, strlen(name));
    if (names->count == search->most || !copy ||
        !fsdp_grow(&names->items, &names->capacity, names->count + 1, sizeof *names->items)) {
        search->is_cut = true;
        return 1;
    }
    names->items[names->count++] = copy;
    return 0;
}

/* Lists the directory as a whole; NULL where that fails, or where it has too many names. */
static listing *read_listing(cache_io *cache, const char *path)
{
    fsdp_io *inner = cache->pass.inner;
    size_t size = strlen(path) + 1;
    listing *list = fsdp_alloc(1, sizeof *list + size);
    if (!list)
        return NULL;
    memcpy(list->path, path, size);
    name_search search = {.names = &list->names, .most = FSDP_IO_CACHE_NAMES - cache->name_count};
    if (inner->ops->list(inner, path, keep_name, &search) != 0 || search.is_cut) {
        fsdp_io_names_release(&list->names);
        fsdp_free(list);
        return NULL;
    }
    cache->name_count += list->names.count;
    list->next = cache->listings;
    cache->listings = list;
    return list;
}

static int cache_list(fsdp_io *io, const char *path, int (*visit)(void *context, const char *name),
                      void *context)
{
    cache_io *cache = (cache_io *)io;
    fsdp_io *inner = cache->pass.inner;
    listing *list = NULL;
    pthread_mutex_lock(&cache->lock);
    if (!cache->is_ended) {
        list = find_listing(cache, path);
        list = list ? list : read_listing(cache, path);
    }
    pthread_mutex_unlock(&cache->lock);
    if (!list)
        return inner->ops->list(inner, path, visit, context);
    for (size_t i = 0; i < list->names.count; i++)
        if (visit(context, list->names.items[i]) != 0)
            break;
    return 0;
}

/* --- create and free -------------------------------------------------------------------------- */

fsdp_status fsdp_io_cache_create(fsdp_io *inner, fsdp_io **io_out, fsdp_error *err)
{
    cache_io *cache = fsdp_alloc(1, sizeof *cache);
    if (!cache)
        return fsdp_fail_memory(err, "a cache of open files");
    fsdp_io_pass_begin(&cache->pass, "cache", inner);
    cache->pass.ops.open = cache_open;
    cache->pass.ops.list = cache_list;
    cache->pass.ops.close = cache_close;
    pthread_mutex_init(&cache->lock, NULL);
    *io_out = &cache->pass.base;
    return FSDP_OK;
}

void fsdp_io_cache_end(fsdp_io *io)
{
    cache_io *cache = (cache_io *)io;
    pthread_mutex_lock(&cache->lock);
    cache->is_ended = true;
    close_idle(cache, 0);
    free_listings(cache);
    pthread_mutex_unlock(&cache->lock);
}

void fsdp_io_cache_free(fsdp_io *io)
{
    if (!io)
        return;
    fsdp_io_cache_end(io);
    pthread_mutex_destroy(&((cache_io *)io)->lock);
    fsdp_free(io);
}
