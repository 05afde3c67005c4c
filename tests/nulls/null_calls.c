/* Every public call with NULL for each of its pointers in turn (null_calls.py lists them): a NULL object,
 * name, path or output is FSDP_ERR_USAGE and names the argument; options, contexts and err may be NULL;
 * nothing crashes. Each call has a process of its own. */
#include "tests/nulls/null_calls.h"
#include "tests/support/ranks/worlds.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* --- good arguments --------------------------------------------------------------------------- */

const fsdp_param_spec *good_param_spec(const good_arguments *good)
{
    static fsdp_param_spec spec = {.name = "another", .dtype = FSDP_F32, .ndim = 1};
    spec.shape = good->bytes;
    return &spec;
}

fsdp_status good_all_reduce_hook(void *context, void *data, fsdp_dtype dtype, int64_t count,
                                 fsdp_error *err)
{
    (void)context, (void)data, (void)dtype, (void)count, (void)err;
    return FSDP_OK;
}

void good_file_digest_visit(void *context, const char *name, const uint8_t digest[32])
{
    (void)context, (void)name, (void)digest;
}

fsdp_status good_grad_hook(void *context, fsdp_param *param, fsdp_error *err)
{
    (void)context, (void)param, (void)err;
    return FSDP_OK;
}

fsdp_status good_param_fill(void *context, const fsdp_param *param, const fsdp_box *box, void *data,
                            fsdp_error *err)
{
    (void)context, (void)param, (void)box, (void)data, (void)err;
    return FSDP_OK;
}

fsdp_status good_rank_body(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    (void)context, (void)ctl, (void)err;
    return FSDP_OK;
}

int good_rank_main(void *context, fsdp_world *world, int argc, char **argv)
{
    (void)context, (void)world, (void)argc, (void)argv;
    return 0;
}

fsdp_status good_slab_visit(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    (void)context, (void)entry, (void)first, (void)count, (void)data, (void)err;
    return FSDP_OK;
}

fsdp_status good_wrap_comm_hook(void *context, fsdp_comm *comm, const fsdp_wrap_bucket *bucket,
                                fsdp_error *err)
{
    (void)context, (void)comm, (void)bucket, (void)err;
    return FSDP_OK;
}

static fsdp_status make_model(good_arguments *good, fsdp_model **model_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_model_create(good->world, model_out, err));
    return fsdp_model_add(
        *model_out,
        &(fsdp_param_spec){.name = "x.w", .dtype = FSDP_F32, .ndim = 1, .shape = good->bytes},
        &good->param, err);
}

static fsdp_status make_good(good_arguments *good, fsdp_model **wrapped, fsdp_error *err)
{
    const char *name = "dp";
    FSDP_TRY(fsdp_world_mesh(good->world, 1, good->bytes, &name, &good->mesh, err));
    good->ctl = fsdp_world_ctl(good->world);
    good->comm = fsdp_world_comm(good->world, good->mesh, 0, 0);
    FSDP_TRY(make_model(good, wrapped, err));
    FSDP_TRY(fsdp_wrap_create(*wrapped, NULL, &good->wrap, err));
    FSDP_TRY(make_model(good, &good->model, err));
    const fsdp_unit_opts opts = {.mesh = good->mesh};
    FSDP_TRY(fsdp_unit_create(good->model, "x", &opts, &good->unit, err));
    FSDP_TRY(fsdp_root_create(good->model, &opts, &good->root, err));
    FSDP_TRY(fsdp_adamw_create(good->root, NULL, &good->optim, err));
    FSDP_TRY(fsdp_scaler_create(NULL, &good->scaler, err));
    FSDP_TRY(fsdp_async_saver_create(good->root, NULL, &good->async_saver, err));
    FSDP_TRY(fsdp_filter_create(NULL, NULL, &good->filter, err));
    FSDP_TRY(fsdp_root_get_state(good->root, NULL, &good->sd, err));
    FSDP_TRY(fsdp_sd_save(good->sd, good->ctl, "saved", NULL, err));
    FSDP_TRY(fsdp_conversion_open("saved", "converted", NULL, &good->conversion, err));
    return fsdp_checkpoint_open("saved", NULL, &good->checkpoint, err);
}

static void free_good(good_arguments *good, fsdp_model *wrapped)
{
    fsdp_checkpoint_close(good->checkpoint);
    fsdp_conversion_close(good->conversion);
    fsdp_sd_free(good->sd);
    fsdp_filter_free(good->filter);
    fsdp_async_saver_free(good->async_saver);
    fsdp_scaler_free(good->scaler);
    fsdp_optim_free(good->optim);
    fsdp_root_free(good->root);
    fsdp_wrap_free(good->wrap);
    fsdp_model_free(good->model);
    fsdp_model_free(wrapped);
    fsdp_mesh_free(good->mesh);
}

/* --- the calls -------------------------------------------------------------------------------- */

static void call_alone(const null_call *what, good_arguments *good)
{
    char words[100];
    fsdp_error why = {0};
    alarm(20);
    fsdp_status status = what->call(good, &why);
    snprintf(words, sizeof words, "'%s' is NULL", what->argument);
    if (what->is_refused && (status != FSDP_ERR_USAGE || !strstr(why.text, words))) {
        printf("%s with %s NULL: status %d, '%s'\n", what->function, what->argument, status,
               why.text);
        fflush(stdout);
        _exit(1);
    }
    _exit(0);
}

static bool is_right(const null_call *what, good_arguments *good)
{
    int how = -1;
    pid_t child = fork();
    if (child == 0)
        call_alone(what, good);
    waitpid(child, &how, 0);
    if (how != 0 && !(WIFEXITED(how) && WEXITSTATUS(how) == 1))
        printf("%s with %s NULL: crashed (%#x)\n", what->function, what->argument, (unsigned)how);
    return how == 0;
}

static fsdp_status make_calls(world_rank *rank, fsdp_error *err)
{
    int64_t ones[512];
    fsdp_model *wrapped = NULL;
    good_arguments good = {.world = rank->world, .bytes = ones};
    int wrong = 0;
    for (size_t i = 0; i < sizeof ones / sizeof *ones; i++)
        ones[i] = 1;
    fsdp_status status = make_good(&good, &wrapped, err);
    for (size_t i = 0; i < null_call_count && status == FSDP_OK; i++)
        wrong += !is_right(&null_calls[i], &good);
    free_good(&good, wrapped);
    if (wrong > 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "%d calls are wrong", wrong);
    return status;
}

int main(void)
{
    char directory[] = "/tmp/fsdp-nulls-XXXXXX", remove[100];
    fsdp_error err = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!mkdtemp(directory) || chdir(directory) != 0)
        return 1;
    fsdp_status status = run_worlds(1, "cpu", make_calls, NULL, &err);
    snprintf(remove, sizeof remove, "rm -rf %s", directory);
    if (system(remove) != 0)
        return 1;
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}
