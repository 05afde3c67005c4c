/*
 * Meshes: the coordinates of every world rank. A dense mesh (0, 1, 2, ...) stores no ranks, so a
 * mesh of any size costs nothing; others keep a table sorted by rank to find coordinates.
 */
#include "statedict/sd/layout_internal.h"

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/text.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct mesh_member {
    int rank;
    int position;
} mesh_member;

struct fsdp_mesh {
    atomic_int holders; /* beside the first owner */
    int ndim;
    int64_t shape[FSDP_MAX_MESH_DIMS];
    char names[FSDP_MAX_MESH_DIMS][FSDP_MAX_MESH_NAME + 1];
    int64_t size;
    int world;
    int *ranks;           /* by position; NULL when dense */
    mesh_member *by_rank; /* NULL when dense */
};

/* --- creating --------------------------------------------------------------------------------- */

static bool is_name_byte(char c)
{
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.' || c == '-';
}

static bool is_mesh_name(const char *name, size_t size)
{
    if (size == 0 || size > FSDP_MAX_MESH_NAME)
        return false;
    for (size_t i = 0; i < size; i++) {
        if (!is_name_byte(name[i]))
            return false;
    }
    return true;
}

static fsdp_status set_names(fsdp_mesh *mesh, const char *const *names, fsdp_error *err)
{
    for (int i = 0; i < mesh->ndim; i++) {
        if (!names || !names[i])
            return fsdp_fail(err, FSDP_ERR_USAGE, "mesh dim %d has no name", i);
        size_t size = strnlen(names[i], FSDP_MAX_MESH_NAME + 1);
        if (!is_mesh_name(names[i], size)) {
            char text[100];
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "mesh dim name '%s': 1 to %d of A-Z a-z 0-9 _ . - are allowed",
                             fsdp_printable(names[i], size, text, sizeof text), FSDP_MAX_MESH_NAME);
        }
        memcpy(mesh->names[i], names[i], size);
        for (int before = 0; before < i; before++) {
            if (strcmp(mesh->names[before], mesh->names[i]) == 0)
                return fsdp_fail(err, FSDP_ERR_USAGE, "two mesh dims are named '%s'", names[i]);
        }
    }
    return FSDP_OK;
}

static fsdp_status set_shape(fsdp_mesh *mesh, int ndim, const int64_t *shape, fsdp_error *err)
{
    if (ndim < 1 || ndim > FSDP_MAX_MESH_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has %d dims, 1 to %d are allowed", ndim,
                         FSDP_MAX_MESH_DIMS);
    mesh->ndim = ndim;
    mesh->size = 1;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 1)
            return fsdp_fail(err, FSDP_ERR_USAGE, "mesh dim %d has size %lld", i,
                             (long long)shape[i]);
        if (shape[i] > INT_MAX || mesh->size > INT_MAX / shape[i])
            return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has more than %d ranks", INT_MAX);
        mesh->shape[i] = shape[i];
        mesh->size *= shape[i];
    }
    mesh->world = (int)mesh->size;
    return FSDP_OK;
}

static int compare_ranks(const void *left, const void *right)
{
    const mesh_member *a = left, *b = right;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

static bool counts_up(const int *ranks, int64_t size)
{
    for (int64_t i = 0; i < size; i++) {
        if (ranks[i] != i)
            return false;
    }
    return true;
}

static fsdp_status set_ranks(fsdp_mesh *mesh, const int *ranks, fsdp_error *err)
{
    if (!ranks || counts_up(ranks, mesh->size))
        return FSDP_OK;
    size_t n = (size_t)mesh->size;
    mesh->ranks = fsdp_alloc(n, sizeof *mesh->ranks);
    mesh->by_rank = fsdp_alloc(n, sizeof *mesh->by_rank);
    if (!mesh->ranks || !mesh->by_rank)
        return fsdp_fail_memory(err, "a mesh");
    memcpy(mesh->ranks, ranks, n * sizeof *ranks);
    for (size_t i = 0; i < n; i++)
        mesh->by_rank[i] = (mesh_member){.rank = ranks[i], .position = (int)i};
    qsort(mesh->by_rank, n, sizeof *mesh->by_rank, compare_ranks);
    if (mesh->by_rank[0].rank < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh names rank %d", mesh->by_rank[0].rank);
    for (size_t i = 1; i < n; i++) {
        if (mesh->by_rank[i].rank == mesh->by_rank[i - 1].rank)
            return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh names rank %d twice",
                             mesh->by_rank[i].rank);
    }
    if (mesh->by_rank[n - 1].rank == INT_MAX)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh names rank %d", INT_MAX);
    mesh->world = mesh->by_rank[n - 1].rank + 1;
    return FSDP_OK;
}

fsdp_status fsdp_mesh_create(int ndim, const int64_t *shape, const char *const *names,
                             const int *ranks, fsdp_mesh **mesh_out, fsdp_error *err)
{
    FSDP_NEED(err, mesh_out);
    *mesh_out = NULL;
    FSDP_NEED(err, shape, names);
    fsdp_mesh *mesh = fsdp_alloc(1, sizeof *mesh);
    if (!mesh)
        return fsdp_fail_memory(err, "a mesh");
    fsdp_status status = set_shape(mesh, ndim, shape, err);
    if (status == FSDP_OK)
        status = set_names(mesh, names, err);
    if (status == FSDP_OK)
        status = set_ranks(mesh, ranks, err);
    if (status != FSDP_OK) {
        fsdp_mesh_free(mesh);
        return status;
    }
    *mesh_out = mesh;
    return FSDP_OK;
}

fsdp_mesh *fsdp_mesh_hold(const fsdp_mesh *mesh)
{
    fsdp_mesh *held = (fsdp_mesh *)mesh;
    atomic_fetch_add(&held->holders, 1);
    return held;
}

void fsdp_mesh_free(fsdp_mesh *mesh)
{
    if (!mesh || atomic_fetch_sub(&mesh->holders, 1) > 0)
        return;
    fsdp_free(mesh->ranks);
    fsdp_free(mesh->by_rank);
    fsdp_free(mesh);
}

fsdp_status fsdp_mesh_copy(const fsdp_mesh *mesh, fsdp_mesh **copy_out, fsdp_error *err)
{
    const char *names[FSDP_MAX_MESH_DIMS];
    for (int i = 0; i < mesh->ndim; i++)
        names[i] = mesh->names[i];
    return fsdp_mesh_create(mesh->ndim, mesh->shape, names, mesh->ranks, copy_out, err);
}

/* --- queries ---------------------------------------------------------------------------------- */

int fsdp_mesh_ndim(const fsdp_mesh *mesh)
{
    if (!mesh)
        return 0;
    return mesh->ndim;
}

int64_t fsdp_mesh_dim_size(const fsdp_mesh *mesh, int dim)
{
    if (!mesh)
        return 0;
    return mesh->shape[dim];
}

const char *fsdp_mesh_dim_name(const fsdp_mesh *mesh, int dim)
{
    if (!mesh)
        return NULL;
    return mesh->names[dim];
}

int64_t fsdp_mesh_size(const fsdp_mesh *mesh)
{
    if (!mesh)
        return 0;
    return mesh->size;
}

int fsdp_mesh_world(const fsdp_mesh *mesh)
{
    return mesh->world;
}

bool fsdp_mesh_is_dense(const fsdp_mesh *mesh)
{
    return !mesh->ranks;
}

int fsdp_mesh_rank_at(const fsdp_mesh *mesh, int64_t position)
{
    return mesh->ranks ? mesh->ranks[position] : (int)position;
}

int64_t fsdp_mesh_position(const fsdp_mesh *mesh, int rank)
{
    if (!mesh->ranks)
        return rank >= 0 && rank < mesh->size ? rank : -1;
    int64_t lo = 0, hi = mesh->size;
    while (lo < hi) {
        int64_t middle = lo + (hi - lo) / 2;
        if (mesh->by_rank[middle].rank < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo < mesh->size && mesh->by_rank[lo].rank == rank ? mesh->by_rank[lo].position : -1;
}

bool fsdp_mesh_coord(const fsdp_mesh *mesh, int rank, int64_t *coord_out)
{
    if (!mesh || !coord_out)
        return false;
    int64_t position = fsdp_mesh_position(mesh, rank);
    if (position < 0)
        return false;
    for (int i = mesh->ndim - 1; i >= 0; i--) {
        coord_out[i] = position % mesh->shape[i];
        position /= mesh->shape[i];
    }
    return true;
}

bool fsdp_mesh_equal(const fsdp_mesh *a, const fsdp_mesh *b)
{
    if (a == b)
        return true;
    if (!a || !b || a->ndim != b->ndim || a->world != b->world || !a->ranks != !b->ranks)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i] || strcmp(a->names[i], b->names[i]) != 0)
            return false;
    }
    return !a->ranks || memcmp(a->ranks, b->ranks, (size_t)a->size * sizeof *a->ranks) == 0;
}
