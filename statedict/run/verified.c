/* Checkpoints that this process has verified. See verified.h. */
#include "statedict/run/verified.h"

#include "kernels/kernels.h"

#include <pthread.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fsdp_fingerprint known[FSDP_VERIFIED_KEPT];
static size_t known_count;

bool fsdp_verified_has(const fsdp_fingerprint *print)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    size_t count = known_count < FSDP_VERIFIED_KEPT ? known_count : FSDP_VERIFIED_KEPT;
    for (size_t i = 0; i < count && !found; i++)
        found = memcmp(&known[i], print, sizeof *print) == 0;
    pthread_mutex_unlock(&lock);
    return found;
}

void fsdp_verified_add(const fsdp_fingerprint *print)
{
    if (fsdp_verified_has(print))
        return;
    pthread_mutex_lock(&lock);
    known[known_count++ % FSDP_VERIFIED_KEPT] = *print;
    pthread_mutex_unlock(&lock);
}

/* Directory order is undefined, so the hashes of names are added up. */
static void add_hash(fsdp_fingerprint *print, const void *data, size_t size)
{
    fsdp_hash hash = fsdp_kernels_get()->hash(data, size);
    uint64_t parts[2];
    memcpy(parts, hash.bytes, sizeof parts);
    print->parts[0] += parts[0];
    print->parts[1] += parts[1];
}

static bool add_file(fsdp_io *io, const char *dir, const char *name, fsdp_fingerprint *print)
{
    fsdp_file_info info;
    char *path = fsdp_path_join(dir, name);
    bool seen = path && io->ops->info(io, path, &info) == 0;
    fsdp_free(path);
    if (!seen)
        return false;
    fsdp_hash hash = fsdp_kernels_get()->hash(name, strlen(name));
    uint64_t facts[6] = {0,           0,        (uint64_t)info.size, (uint64_t)info.mtime_ns,
                         info.device, info.node};
    memcpy(facts, hash.bytes, sizeof hash.bytes);
    add_hash(print, facts, sizeof facts);
    return true;
}

/* Markers and pins are no part of the fingerprint: they change while the data does not. */
static bool is_part(void *context, const char *name)
{
    (void)context;
    return name[0] != '.';
}

bool fsdp_fingerprint_take(fsdp_io *io, const char *dir, fsdp_fingerprint *print_out)
{
    fsdp_io_names names;
    *print_out = (fsdp_fingerprint){{0}};
    if (fsdp_io_list_names(io, dir, is_part, NULL, &names, NULL) != FSDP_OK)
        return false;
    bool seen = true;
    for (size_t i = 0; i < names.count && seen; i++)
        seen = add_file(io, dir, names.items[i], print_out);
    fsdp_io_names_release(&names);
    add_hash(print_out, dir, strlen(dir));
    add_hash(print_out, &io,
             sizeof io); /* tests simulate many disks, on which the same names recur */
    return seen;
}
