/* Meshes: which rank sits where, and back. */
#include "statedict/sd/layout_internal.h"
#include <fsdp/layout.h>

#include <criterion/criterion.h>
#include <limits.h>
#include <string.h>

static const char *const dim_names[] = {"a", "b", "c", "d"};

static fsdp_mesh *make_mesh(int ndim, const int64_t *shape, const int *ranks)
{
    fsdp_mesh *mesh = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_mesh_create(ndim, shape, dim_names, ranks, &mesh, &err), FSDP_OK, "%s",
                 err.text);
    return mesh;
}

static void refuse_mesh(int ndim, const int64_t *shape, const char *const *names, const int *ranks,
                        const char *words)
{
    fsdp_mesh *mesh = (fsdp_mesh *)&mesh;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_mesh_create(ndim, shape, names, ranks, &mesh, &err), FSDP_ERR_USAGE);
    cr_assert_null(mesh);
    cr_assert(strstr(err.text, words), "'%s' lacks '%s'", err.text, words);
}

Test(mesh, answers_what_it_was_made_of)
{
    int64_t shape[] = {2, 3}, coord[2];
    fsdp_mesh *mesh = make_mesh(2, shape, NULL);
    cr_assert_eq(fsdp_mesh_ndim(mesh), 2);
    cr_assert_eq(fsdp_mesh_size(mesh), 6);
    cr_assert_eq(fsdp_mesh_dim_size(mesh, 1), 3);
    cr_assert_str_eq(fsdp_mesh_dim_name(mesh, 1), "b");
    cr_assert(fsdp_mesh_is_dense(mesh));
    for (int rank = 0; rank < 6; rank++) {
        cr_assert(fsdp_mesh_coord(mesh, rank, coord));
        cr_assert_eq(coord[0], rank / 3);
        cr_assert_eq(coord[1], rank % 3);
        cr_assert_eq(fsdp_mesh_rank_at(mesh, rank), rank);
    }
    cr_assert_not(fsdp_mesh_coord(mesh, 6, coord));
    cr_assert_not(fsdp_mesh_coord(mesh, -1, coord));
    fsdp_mesh_free(mesh);
    fsdp_mesh_free(NULL);
}

Test(mesh, finds_every_rank_of_a_shuffled_mesh_and_no_other)
{
    enum { SIZE = 60 };
    int ranks[SIZE];
    for (int i = 0; i < SIZE; i++)
        ranks[i] = (i * 37 % SIZE) * 3 + 5;
    fsdp_mesh *mesh = make_mesh(3, (int64_t[]){3, 4, 5}, ranks);
    cr_assert_not(fsdp_mesh_is_dense(mesh));
    int found = 0;
    for (int rank = -3; rank < 4 * SIZE; rank++) {
        int64_t coord[3];
        if (!fsdp_mesh_coord(mesh, rank, coord))
            continue;
        cr_assert_eq(ranks[(coord[0] * 4 + coord[1]) * 5 + coord[2]], rank);
        found++;
    }
    cr_assert_eq(found, SIZE);
    fsdp_mesh_free(mesh);
}

Test(mesh, ranks_that_count_up_from_0_are_dense)
{
    fsdp_mesh *listed = make_mesh(1, (int64_t[]){3}, (int[]){0, 1, 2});
    fsdp_mesh *plain = make_mesh(1, (int64_t[]){3}, NULL);
    fsdp_mesh *moved = make_mesh(1, (int64_t[]){3}, (int[]){0, 2, 1});
    cr_assert(fsdp_mesh_is_dense(listed));
    cr_assert(fsdp_mesh_equal(listed, plain));
    cr_assert_not(fsdp_mesh_equal(moved, plain));
    fsdp_mesh_free(listed);
    fsdp_mesh_free(plain);
    fsdp_mesh_free(moved);
}

Test(mesh, equal_compares_shape_names_and_ranks)
{
    fsdp_mesh *mesh = make_mesh(2, (int64_t[]){2, 3}, NULL), *other = NULL;
    fsdp_mesh *turned = make_mesh(2, (int64_t[]){3, 2}, NULL);
    const char *names[] = {"a", "x"};
    cr_assert_eq(fsdp_mesh_create(2, (int64_t[]){2, 3}, names, NULL, &other, NULL), FSDP_OK);
    cr_assert(fsdp_mesh_equal(mesh, mesh));
    cr_assert_not(fsdp_mesh_equal(mesh, turned));
    cr_assert_not(fsdp_mesh_equal(mesh, other));
    fsdp_mesh_free(mesh);
    fsdp_mesh_free(turned);
    fsdp_mesh_free(other);
}

Test(mesh, a_huge_dense_mesh_costs_no_memory)
{
    int64_t coord[2];
    fsdp_mesh *mesh = make_mesh(2, (int64_t[]){1 << 15, 1 << 15}, NULL);
    cr_assert(fsdp_mesh_coord(mesh, (1 << 30) - 1, coord));
    cr_assert_eq(coord[1], (1 << 15) - 1);
    fsdp_mesh_free(mesh);
}

Test(mesh, refuses_what_is_no_mesh)
{
    int64_t two_by_two[] = {2, 2};
    const char *twice[] = {"dp", "dp"}, *blank[] = {"dp", "t p"}, *empty[] = {"", "tp"};
    const char *missing[] = {"dp", NULL}, *longest[] = {"a234567890123456789012345678901", "b"};
    const char *too_long[] = {"a2345678901234567890123456789012", "b"};
    refuse_mesh(0, two_by_two, dim_names, NULL, "0 dims");
    refuse_mesh(5, (int64_t[]){1, 1, 1, 1, 1}, dim_names, NULL, "5 dims");
    refuse_mesh(2, (int64_t[]){2, 0}, dim_names, NULL, "mesh dim 1 cannot have size 0");
    refuse_mesh(2, (int64_t[]){1 << 20, 1 << 20}, dim_names, NULL, "more than 2147483647 ranks");
    refuse_mesh(1, (int64_t[]){INT64_MAX}, dim_names, NULL, "more than");
    refuse_mesh(2, two_by_two, twice, NULL, "two mesh dims are named 'dp'");
    refuse_mesh(2, two_by_two, blank, NULL, "'t p'");
    refuse_mesh(2, two_by_two, empty, NULL, "''");
    refuse_mesh(2, two_by_two, missing, NULL, "mesh dim 1 has no name");
    refuse_mesh(2, two_by_two, NULL, NULL, "'names' is NULL");
    refuse_mesh(2, two_by_two, too_long, NULL, "1 to 31");
    refuse_mesh(2, two_by_two, dim_names, (int[]){0, 1, 2, 1}, "rank 1 twice");
    refuse_mesh(2, two_by_two, dim_names, (int[]){0, 1, 2, -4}, "rank -4");
    refuse_mesh(2, two_by_two, dim_names, (int[]){0, 1, 2, INT_MAX}, "rank 2147483647");
    fsdp_mesh *mesh = NULL;
    cr_assert_eq(fsdp_mesh_create(2, two_by_two, longest, NULL, &mesh, NULL), FSDP_OK);
    fsdp_mesh_free(mesh);
}
