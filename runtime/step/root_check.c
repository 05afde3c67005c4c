/*
 * Ranks must declare the same model and make the same calls. They compare their declarations when the root is
 * made and, with --check, the events of every step when its backward ends. Without this, a difference shows
 * only at the first collective that does not match, which may come much later or never.
 */
#include "runtime/step/step_internal.h"

#include <string.h>

#include "base/core/mem.h"
#include "kernels/kernels.h"

/* --- comparison ------------------------------------------------------------------------------- */

static void add_shape(fsdp_text *text, const fsdp_param *param)
{
    for (int i = 0; i < param->ndim; i++)
        fsdp_text_addf(text, "%s%lld", i > 0 ? ", " : "", (long long)param->shape[i]);
}

static void describe_param(fsdp_text *text, const fsdp_param *param)
{
    fsdp_text_addf(text, "unit %s: %s %s [", param->unit ? param->unit->name : "(none)",
                   param->name, fsdp_dtype_name(param->dtype));
    add_shape(text, param);
    fsdp_text_addf(text, "] cut along dim %d%s\n", param->cut.dim,
                   param->requires_grad ? "" : ", frozen");
}

static void describe_unit(fsdp_text *text, const fsdp_unit *unit)
{
    fsdp_text_addf(text, "unit %s: gathered as %s, reduced as %s, reshard_after_forward %d\n",
                   unit->name, fsdp_dtype_name(unit->opts.param_dtype),
                   fsdp_dtype_name(unit->opts.reduce_dtype), unit->settings.reshard_after_forward);
}

static void describe(fsdp_text *text, const fsdp_root *root)
{
    for (size_t i = 0; i < root->model->count; i++)
        describe_param(text, root->model->params[i]);
    for (size_t i = 0; i < root->unit_count; i++)
        describe_unit(text, root->units[i]);
}

/* --- comparing -------------------------------------------------------------------------------- */

static fsdp_status find_other(fsdp_comm *comm, const fsdp_text *text, int *other_out,
                              fsdp_error *err)
{
    int size = fsdp_comm_size(comm);
    fsdp_hash mine = fsdp_kernels_get()->hash(text->data, text->size);
    fsdp_hash *all = fsdp_alloc((size_t)size, sizeof *all);
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = FSDP_U8,
                                  .in = &mine,
                                  .out = all,
                                  .count = sizeof mine,
                                  .unit = "a comparison of all ranks"};
    if (!all)
        return fsdp_fail_memory(err, "what ranks compare");
    fsdp_status status = fsdp_comm_run(comm, &call, err);
    for (int i = 1; i < size && status == FSDP_OK && *other_out == 0; i++)
        if (memcmp(&all[i], &all[0], sizeof *all) != 0)
            *other_out = i;
    fsdp_free(all);
    return status;
}

/* Gives every rank the text of rank `from`; the caller frees it. */
static fsdp_status fetch(fsdp_comm *comm, int from, const fsdp_text *local, char **text_out,
                         fsdp_error *err)
{
    int64_t size = (int64_t)local->size;
    fsdp_collective call = {.kind = FSDP_BROADCAST,
                            .dtype = FSDP_I64,
                            .in = &size,
                            .out = &size,
                            .count = 1,
                            .root = from,
                            .unit = "a comparison of all ranks"};
    FSDP_TRY(fsdp_comm_run(comm, &call, err));
    char *text = fsdp_alloc((size_t)size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, "what ranks compare");
    if (fsdp_comm_rank(comm) == from && size > 0)
        memcpy(text, local->data, (size_t)size);
    call.dtype = FSDP_U8;
    call.in = call.out = text;
    call.count = size;
    fsdp_status status = size > 0 ? fsdp_comm_run(comm, &call, err) : FSDP_OK;
    if (status == FSDP_OK)
        *text_out = text;
    else
        fsdp_free(text);
    return status;
}

/* Moves both to the first line that differs. */
static void skip_common(const char **a, const char **b)
{
    for (;;) {
        size_t line = strcspn(*a, "\n");
        if (line == 0 || strncmp(*a, *b, line + 1) != 0)
            return;
        *a += line + 1;
        *b += line + 1;
    }
}

static fsdp_status report(fsdp_comm *comm, int other, const char *what, const char *first,
                          const char *second, fsdp_error *err)
{
    skip_common(&first, &second);
    const int *ranks = fsdp_comm_ranks(comm);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "ranks %d and %d differ in %s: rank %d has '%.*s', rank %d has '%.*s'",
                     ranks[0], ranks[other], what, ranks[0], *first ? (int)strcspn(first, "\n") : 7,
                     *first ? first : "nothing", ranks[other],
                     *second ? (int)strcspn(second, "\n") : 7, *second ? second : "nothing");
}

static fsdp_status compare(fsdp_comm *comm, const char *what, const fsdp_text *text,
                           fsdp_error *err)
{
    int other = 0;
    char *first = NULL, *second = NULL;
    FSDP_TRY(find_other(comm, text, &other, err));
    if (other == 0)
        return FSDP_OK;
    fsdp_status status = fetch(comm, 0, text, &first, err);
    if (status == FSDP_OK)
        status = fetch(comm, other, text, &second, err);
    if (status == FSDP_OK)
        status = report(comm, other, what, first, second, err);
    fsdp_free(first);
    fsdp_free(second);
    return status;
}

/* --- moments of checks ------------------------------------------------------------------------ */

/* A rank without memory for the comparison aborts it, because the others wait in it. */
static fsdp_status compare_over(fsdp_root *root, const char *what, fsdp_text *text, fsdp_error *err)
{
    fsdp_ordered_comm *ordered;
    fsdp_error why = {0};
    fsdp_status status = fsdp_root_widest_comm(root, &ordered, &why);
    if (!ordered)
        return FSDP_OK;
    if (status == FSDP_OK && text->failed)
        status = fsdp_fail_memory(&why, "what ranks compare");
    if (status == FSDP_OK)
        status = compare(ordered->comm, what, text, &why);
    if (status == FSDP_ERR_LIMIT)
        fsdp_comm_abort(ordered->comm, &why);
    if (status != FSDP_OK && err)
        *err = why;
    return status;
}

fsdp_status fsdp_root_check_structure(fsdp_root *root, fsdp_error *err)
{
    fsdp_text text = {0};
    describe(&text, root);
    fsdp_status status = compare_over(root, "what they declare", &text, err);
    fsdp_text_release(&text);
    return status;
}

/* --- parameters without a gradient ------------------------------------------------------------ */

/* Frozen, ignored and unused ones that the unit expects are right. */
static bool lacks_grad(fsdp_param *param)
{
    const fsdp_param *held = param->flat ? param->flat : param;
    bool lacks = param->requires_grad && held->group && !param->had_grad && !param->was_reported &&
                 !held->group->settings->reduces_unused;
    param->had_grad = false;
    return lacks;
}

void fsdp_root_report_lacking(const fsdp_root *root)
{
    const fsdp_model *declared = root->declared;
    fsdp_text text = {0};
    for (size_t i = 0; i < declared->count; i++) {
        fsdp_param *param = declared->params[i];
        if (!lacks_grad(param))
            continue;
        param->was_reported = true;
        fsdp_text_addf(&text, "%s'%s'", text.size > 0 ? ", " : "", param->name);
    }
    if (text.size > 0 && !text.failed)
        fsdp_launch_note(root->world->rank, "trainable parameters got no gradient in a backward",
                         text.data);
    fsdp_text_release(&text);
}

fsdp_status fsdp_root_check_events(fsdp_root *root, fsdp_error *err)
{
    if (!root->world->parts.check)
        return FSDP_OK;
    fsdp_status status = compare_over(root, "what they did in this step", &root->events, err);
    root->events.size = 0;
    return status;
}
