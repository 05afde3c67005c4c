/* Opens OpenBLAS. See nn_openblas.h. */
#include "kernels/nn/nn_openblas.h"

#include "kernels/processor.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const char library_name[] = "libopenblas.so.0";

/* OpenBLAS maps 128 MiB for each thread that is in a call, of which it uses little; its code has 36 MiB. */
enum { BUFFER_MIB = 160, LIBRARY_MIB = 64, MOST_THREADS = 1024 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static fsdp_nn_openblas opened;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users,
    buffers_made; /* threads that may be in a call; buffers that are mapped, at least */
static bool is_asked_for;

/* OpenBLAS takes processors that are newer than itself for very old ones. */
static const char *core_of_processor(void)
{
    const fsdp_processor processor = fsdp_processor_find();
    if (processor.has_avx512)
        return "SkylakeX";
    return processor.has_avx2 && processor.has_fma ? "Haswell" : NULL;
}

/* Pointers to functions and to objects convert into each other through memory only. */
static bool find(void *library, const char *name, void *function_out)
{
    void *symbol = dlsym(library, name);
    memcpy(function_out, &symbol, sizeof symbol);
    return symbol;
}

/* Unless the user has set it. */
static bool set_variable(const char *name, const char *value)
{
    return value && !getenv(name) && setenv(name, value, 1) == 0;
}

/* --- room ------------------------------------------------------------------------------------- */

/* Whether so much address space is left, which 'ulimit -v' and strict overcommit bound. */
static bool has_room(int mib)
{
    size_t size = (size_t)mib << 20;
    void *room = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return room != MAP_FAILED && munmap(room, size) == 0;
}

static fsdp_status fail_room(int threads, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "cannot use OpenBLAS: it needs %d MiB of address space for each of %d "
                     "threads; raise 'ulimit -v', or set FSDP_PRODUCTS=own",
                     BUFFER_MIB, threads);
}

/* Buffers stay mapped once they were made: as many as were held at once are there, less those of users. */
static bool make_buffers(int count)
{
    void *buffers[MOST_THREADS];
    int made = 0;
    bool fits = true;
    for (; made < count && fits; made += fits) {
        fits = made + users < buffers_made || has_room(BUFFER_MIB);
        if (fits)
            buffers[made] = opened.alloc(0);
    }
    buffers_made = made > buffers_made ? made : buffers_made;
    while (made > 0)
        opened.free(buffers[--made]);
    return fits;
}

fsdp_status fsdp_nn_openblas_take(int threads, const fsdp_nn_openblas **blas_out, fsdp_error *err)
{
    fsdp_status status = FSDP_OK;
    *blas_out = NULL;
    pthread_mutex_lock(&lock);
    if (opened.is_used) {
        bool fits = users + threads <= MOST_THREADS;
        fits =
            fits && (opened.alloc ? make_buffers(users + threads) : has_room(threads * BUFFER_MIB));
        if (fits) {
            users += threads;
            *blas_out = &opened;
        } else if (is_asked_for) {
            status = fail_room(threads, err);
        } else {
            opened.is_used = users > 0; /* for the name of what makes the products */
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void fsdp_nn_openblas_give_back(const fsdp_nn_openblas *blas, int threads)
{
    pthread_mutex_lock(&lock);
    users -= blas ? threads : 0;
    pthread_mutex_unlock(&lock);
}

/* --- opening ---------------------------------------------------------------------------------- */

/* It reads both variables when it is loaded. They are not for programs that this one starts. */
static void *load(void)
{
    static const char core[] = "OPENBLAS_CORETYPE", threads[] = "OPENBLAS_NUM_THREADS";
    bool has_set_core = set_variable(core, core_of_processor());
    bool has_set_threads = set_variable(threads, "1");
    void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    if (has_set_core)
        (void)unsetenv(core);
    if (has_set_threads)
        (void)unsetenv(threads);
    return library;
}

static fsdp_status open_library(fsdp_error *err)
{
    void (*set_num_threads)(int count);
    char *(*get_corename)(void);
    if (!has_room(LIBRARY_MIB + BUFFER_MIB))
        return fail_room(1, err);
    void *library = load();
    if (!library)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "cannot open %s: %s", library_name, dlerror());
    if (!find(library, "cblas_sgemm", &opened.sgemm) ||
        !find(library, "openblas_set_num_threads", &set_num_threads) ||
        !find(library, "openblas_get_corename", &get_corename)) {
        (void)dlclose(library);
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "%s is not OpenBLAS: it lacks a function",
                         library_name);
    }
    if (!find(library, "blas_memory_alloc", &opened.alloc) ||
        !find(library, "blas_memory_free", &opened.free))
        opened.alloc = NULL;
    set_num_threads(1);
    snprintf(opened.name, sizeof opened.name, "OpenBLAS %s", get_corename());
    opened.is_used = true;
    return FSDP_OK;
}

static void open_once(void)
{
    const char *wanted = getenv("FSDP_PRODUCTS");
    fsdp_error *err = &opened.failure;
    if (!wanted || strcmp(wanted, "auto") == 0) {
        const char *kernels = getenv("FSDP_KERNELS");
        bool is_plain = kernels && strcmp(kernels, "c") == 0;
        if (fsdp_processor_find().has_avx512 && !is_plain)
            (void)!open_library(NULL); /* the products here do as well */
    } else if (strcmp(wanted, "openblas") == 0) {
        is_asked_for = true;
        err->status = open_library(err);
    } else if (strcmp(wanted, "own") != 0) {
        err->status = fsdp_fail(err, FSDP_ERR_USAGE,
                                "FSDP_PRODUCTS is '%s'; use auto, own or openblas", wanted);
    }
}

const fsdp_nn_openblas *fsdp_nn_openblas_get(void)
{
    (void)pthread_once(&once, open_once);
    return &opened;
}
