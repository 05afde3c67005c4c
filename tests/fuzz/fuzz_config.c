/*
 * Fuzz target: a config.json. The tensors of a model that is accepted are listed next to two that every state
 * dict may have, and every shape is one that a tensor may have.
 */
#include "base/core/mem.h"
#include "statedict/expect/expect.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool truth)
{
    if (!truth)
        abort();
}

/* Two tensors, one of which most models have. */
static fsdp_sd *make_sd(void)
{
    static const char *const names[] = {"model.norm.weight", "bias"};
    fsdp_mesh *mesh = NULL;
    fsdp_sd *sd = NULL;
    const int64_t shape[] = {16};
    require(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &mesh, NULL) ==
            FSDP_OK);
    require(fsdp_sd_create(&sd, NULL) == FSDP_OK);
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh};
    for (int i = 0; i < 2; i++)
        require(fsdp_sd_add_tensor(sd, names[i], strlen(names[i]),
                                   &(fsdp_tensor){FSDP_F32, 1, shape, layout, NULL},
                                   NULL) == FSDP_OK);
    fsdp_mesh_free(mesh);
    return sd;
}

static fsdp_status tell(void *context, fsdp_expect_fault fault, const fsdp_expected *expected,
                        const fsdp_entry *entry, fsdp_error *err)
{
    int64_t *told = context;
    (void)err;
    require((fault == FSDP_EXPECT_EXTRA || fault == FSDP_EXPECT_BEYOND) == !expected &&
            (fault == FSDP_EXPECT_MISSING) == !entry);
    for (int d = 0; expected && d < expected->ndim; d++)
        require(expected->shape[d] >= 0);
    require(!expected || (expected->name_size > 0 && !strchr(expected->name, '{')));
    ++*told;
    return FSDP_OK;
}

static void check_expect(const fsdp_expect *expect)
{
    fsdp_sd *sd = make_sd();
    fsdp_expect_counts counts = {0};
    fsdp_error err = {0};
    int64_t told = 0;
    fsdp_status status = fsdp_expect_compare(expect, sd, tell, &told, &counts, &err);
    require(status == FSDP_OK || (err.status == status && err.text[0]));
    require(status != FSDP_OK || told == counts.missing + counts.extra + counts.shapes);
    require(counts.expected <= FSDP_EXPECT_MOST);
    fsdp_sd_free(sd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = size > 0 ? (const char *)data : "";
    fsdp_expect *expect = NULL;
    fsdp_error err = {0};
    fsdp_config_file file;
    fsdp_status status = fsdp_config_parse(text, size, "fuzz", &file, &err);
    require(fsdp_config_check(&file, NULL) == status);
    if (status == FSDP_OK)
        status = fsdp_expect_config(&file, &expect, &err);
    require(status == FSDP_OK ? expect != NULL : !expect && err.status == status && err.text[0]);
    if (expect)
        check_expect(expect);
    fsdp_expect_free(expect);
    fsdp_config_release(&file);
    return 0;
}
