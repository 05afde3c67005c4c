/* Names of steps, staging directories and checkpoints set aside: see disk_names.h. */
#include "statedict/manifest/disk_names.h"

#include "base/core/mem.h"
#include "statedict/manifest/manifest.h"

#include <errno.h>
#include "base/text.h"
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { UUID_DIGITS = 32, STEP_DIGITS = 8 };

/* --- steps ------------------------------------------------------------------------------------ */

void fsdp_step_name(int64_t step, char name_out[FSDP_STEP_NAME_SIZE])
{
    snprintf(name_out, FSDP_STEP_NAME_SIZE, "step-%08" PRId64, step);
}

static bool is_uuid(const char *text)
{
    return strspn(text, "0123456789abcdef") == UUID_DIGITS && text[UUID_DIGITS] == '\0';
}

/* The kind of a name by the text after "step-N": nothing, or one of the suffixes. */
static fsdp_step_name_kind kind_of_suffix(const char *suffix)
{
    size_t staging = strlen(FSDP_SUFFIX_STAGING), deleting = strlen(FSDP_SUFFIX_DELETING),
           replaced = strlen(FSDP_SUFFIX_REPLACED);
    if (*suffix == '\0')
        return FSDP_NAME_STEP;
    if (strncmp(suffix, FSDP_SUFFIX_STAGING, staging) == 0 && is_uuid(suffix + staging))
        return FSDP_NAME_STAGING;
    if (strncmp(suffix, FSDP_SUFFIX_DELETING, deleting) == 0 && is_uuid(suffix + deleting))
        return FSDP_NAME_DELETING;
    if (strncmp(suffix, FSDP_SUFFIX_REPLACED, replaced) == 0 && is_uuid(suffix + replaced))
        return FSDP_NAME_REPLACED;
    return FSDP_NAME_OTHER;
}

fsdp_step_name_kind fsdp_step_parse(const char *name, int64_t *step_out)
{
    static const char start[] = "step-";
    *step_out = FSDP_NO_STEP;
    if (strncmp(name, start, sizeof start - 1) != 0)
        return FSDP_NAME_OTHER;
    const char *digits = name + sizeof start - 1;
    size_t n = strspn(digits, "0123456789");
    if (n < STEP_DIGITS || (n > STEP_DIGITS && *digits == '0'))
        return FSDP_NAME_OTHER;
    int64_t step = 0;
    for (size_t i = 0; i < n; i++) {
        if (fsdp_mul_overflow(step, 10, &step) || fsdp_add_overflow(step, digits[i] - '0', &step))
            return FSDP_NAME_OTHER;
    }
    fsdp_step_name_kind kind = kind_of_suffix(digits + n);
    if (kind != FSDP_NAME_OTHER)
        *step_out = step;
    return kind;
}

/* --- random names ----------------------------------------------------------------------------- */

/* Only for a kernel without getrandom: differs between processes, calls and starts of the
 * system. */
static void fill_without_random(unsigned char *bytes, size_t size)
{
    static uint64_t calls;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t seed = (uint64_t)now.tv_sec * 1000000007u + (uint64_t)now.tv_nsec;
    seed ^= (uint64_t)getpid() << 40 ^ __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) << 20;
    for (size_t i = 0; i < size; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (unsigned char)(seed >> 56);
    }
}

void fsdp_random_hex(char out[33])
{
    static const char digits[] = "0123456789abcdef";
    unsigned char bytes[UUID_DIGITS / 2];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes)
        fill_without_random(bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[UUID_DIGITS] = '\0';
}

/* --- names next to a checkpoint ---------------------------------------------------------------- */

fsdp_status fsdp_beside_name(const char *dir, const char *suffix, char **path_out, fsdp_error *err)
{
    char uuid[33];
    fsdp_random_hex(uuid);
    size_t size = strlen(dir) + strlen(suffix) + sizeof uuid;
    *path_out = fsdp_alloc(size, 1);
    if (!*path_out)
        return fsdp_fail_memory(err, dir);
    snprintf(*path_out, size, "%s%s%s", dir, suffix, uuid);
    return FSDP_OK;
}

static const char *last_element(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static fsdp_status split(const char *dir, char *path, char **parent_out, fsdp_error *err)
{
    const char *name = last_element(path);
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' does not name a directory below another one",
                         dir);
    size_t parent = (size_t)(name - path);
    if (parent == 0)
        *parent_out = fsdp_strndup(".", 1);
    else
        *parent_out = fsdp_strndup(path, parent > 1 ? parent - 1 : 1);
    return *parent_out ? FSDP_OK : fsdp_fail_memory(err, dir);
}

/* Every suffix must fit after the name of DIR, or an overwrite could not set DIR aside. */
fsdp_status fsdp_name_check_room(const char *dir, fsdp_error *err)
{
    enum { MOST = NAME_MAX - (int)(sizeof FSDP_SUFFIX_DELETING - 1) - UUID_DIGITS };
    const char *name = last_element(dir);
    char shown[100];
    size_t size = strlen(name);
    if (size <= MOST)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "the name '%s' is too long for a checkpoint: it has %zu bytes, at most %d are "
                     "allowed, since a suffix is added while it is saved or removed",
                     fsdp_printable(name, size, shown, sizeof shown), size, MOST);
}

fsdp_status fsdp_path_split(const char *dir, char **path_out, char **parent_out, fsdp_error *err)
{
    size_t size = strlen(dir);
    while (size > 1 && dir[size - 1] == '/')
        size--;
    *parent_out = NULL;
    *path_out = fsdp_strndup(dir, size);
    if (!*path_out)
        return fsdp_fail_memory(err, dir);
    fsdp_status status = split(dir, *path_out, parent_out, err);
    if (status != FSDP_OK) {
        fsdp_free(*path_out);
        *path_out = NULL;
    }
    return status;
}

bool fsdp_target_is_step(const char *target, int64_t *step_out)
{
    return fsdp_step_parse(last_element(target), step_out) == FSDP_NAME_STEP;
}

bool fsdp_dir_is_step(const char *dir, int64_t *step_out)
{
    char *path, *parent;
    if (fsdp_path_split(dir, &path, &parent, NULL) != FSDP_OK)
        return false;
    bool is_step = fsdp_target_is_step(path, step_out);
    fsdp_free(path);
    fsdp_free(parent);
    return is_step;
}

bool fsdp_dir_is_staging(const char *dir)
{
    enum { TAIL = sizeof FSDP_SUFFIX_STAGING - 1 + UUID_DIGITS };
    char *path, *parent;
    if (fsdp_path_split(dir, &path, &parent, NULL) != FSDP_OK)
        return false;
    size_t size = strlen(path);
    const char *tail = path + (size > TAIL ? size - TAIL : 0);
    bool is_staging = strncmp(tail, FSDP_SUFFIX_STAGING, sizeof FSDP_SUFFIX_STAGING - 1) == 0 &&
                      is_uuid(tail + sizeof FSDP_SUFFIX_STAGING - 1);
    fsdp_free(path);
    fsdp_free(parent);
    return is_staging;
}

/* Runs identify steps by names; a checkpoint under the name of another step counts as damaged. */
fsdp_status fsdp_name_check_step(const char *dir, int64_t step, fsdp_error *err)
{
    char right[FSDP_STEP_NAME_SIZE];
    int64_t named;
    if (step == FSDP_NO_STEP || !fsdp_dir_is_step(dir, &named) || named == step)
        return FSDP_OK;
    fsdp_step_name(step, right);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' names a different step than the checkpoint holds; name it '%s', or use "
                     "a name that is not a step's",
                     dir, right);
}

typedef struct beside_search {
    const char *name, *suffix;
    size_t name_size, suffix_size;
} beside_search;

static bool is_beside(void *context, const char *name)
{
    const beside_search *search = context;
    return strncmp(name, search->name, search->name_size) == 0 &&
           strncmp(name + search->name_size, search->suffix, search->suffix_size) == 0 &&
           is_uuid(name + search->name_size + search->suffix_size);
}

/* visit may remove the path. */
static bool visit_found(const fsdp_io_names *names, const char *parent,
                        bool (*visit)(void *context, const char *path), void *context)
{
    for (size_t i = 0; i < names->count; i++) {
        char *path = fsdp_path_join(parent, names->items[i]);
        bool more = path && visit(context, path);
        bool failed = !path;
        fsdp_free(path);
        if (!more)
            return !failed;
    }
    return true;
}

bool fsdp_beside_each(fsdp_io *io, const char *dir, const char *suffix,
                      bool (*visit)(void *context, const char *path), void *context)
{
    char *path = NULL, *parent = NULL;
    bool ok = false;
    if (fsdp_path_split(dir, &path, &parent, NULL) == FSDP_OK) {
        const char *name = last_element(path);
        beside_search search = {.name = name,
                                .suffix = suffix,
                                .name_size = strlen(name),
                                .suffix_size = strlen(suffix)};
        fsdp_io_names names;
        ok = fsdp_io_list_names(io, parent, is_beside, &search, &names, NULL) == FSDP_OK &&
             visit_found(&names, parent, visit, context);
        fsdp_io_names_release(&names);
    }
    fsdp_free(path);
    fsdp_free(parent);
    return ok;
}

bool fsdp_has_manifest(fsdp_io *io, const char *dir)
{
    char *path = fsdp_path_join(dir, FSDP_MANIFEST_NAME);
    bool has = path && fsdp_io_exists(io, path);
    fsdp_free(path);
    return has;
}

bool fsdp_lacks_manifest(fsdp_io *io, const char *dir)
{
    fsdp_file_info info;
    char *path = fsdp_path_join(dir, FSDP_MANIFEST_NAME);
    bool lacks = path && io->ops->info(io, path, &info) == -ENOENT;
    fsdp_free(path);
    return lacks;
}

typedef struct replaced_search {
    fsdp_io *io;
    char *found;
} replaced_search;

static bool take_replaced(void *context, const char *path)
{
    replaced_search *search = context;
    if (fsdp_has_manifest(search->io, path))
        search->found = fsdp_strndup(path, strlen(path));
    return !search->found;
}

bool fsdp_replaced_find(fsdp_io *io, const char *dir, char **path_out)
{
    replaced_search search = {.io = io};
    (void)fsdp_beside_each(io, dir, FSDP_SUFFIX_REPLACED, take_replaced, &search);
    *path_out = search.found;
    return search.found != NULL;
}
