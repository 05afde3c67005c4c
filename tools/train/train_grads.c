/* Gradients of a step as safetensors: saved in shards next to the file, converted, removed. See train.h. */
#include "tools/train/train.h"

#include "tools/train/train_file.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

static fsdp_status add_grads(train_job *job, fsdp_sd *sd, fsdp_error *err)
{
    for (size_t u = 0; u < fsdp_root_unit_count(job->root); u++) {
        fsdp_unit *unit = fsdp_root_unit_at(job->root, u);
        for (size_t i = 0; i < fsdp_unit_param_count(unit); i++) {
            fsdp_param *param = fsdp_unit_param_at(unit, i);
            const fsdp_param_info info = fsdp_param_describe(param);
            const fsdp_tensor tensor = {.dtype = info.dtype,
                                        .ndim = info.ndim,
                                        .shape = info.shape,
                                        .layout = *info.layout,
                                        .data = fsdp_param_shard_grad(param)};
            FSDP_TRY(fsdp_sd_add_tensor(sd, info.name, strlen(info.name), &tensor, err));
        }
    }
    return FSDP_OK;
}

/* Rank 0 alone. */
static fsdp_status make_file(const char *shards, const char *path, fsdp_error *err)
{
    const fsdp_convert_opts opts = {.format = "safetensors", .overwrite = true, .skip_fsync = true};
    fsdp_status st = fsdp_checkpoint_convert(shards, path, &opts, err);
    if (st == FSDP_OK)
        return train_file_remove_directory(shards, err);
    (void)train_file_remove_directory(shards, NULL); /* the first failure counts */
    return st;
}

fsdp_status train_dump_grads(train_job *job, const char *path, fsdp_error *err)
{
    char shards[PATH_MAX];
    fsdp_sd *sd = NULL;
    const fsdp_save_opts opts = {.overwrite = true, .skip_fsync = true, .skip_view = true};
    snprintf(shards, sizeof shards, "%s.shards", path);
    fsdp_status st = fsdp_sd_create(&sd, err);
    if (st == FSDP_OK)
        st = add_grads(job, sd, err);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_sd_save(sd, job->ctl, shards, &opts, err);
    fsdp_sd_free(sd);
    if (st == FSDP_OK && job->rank == 0)
        st = make_file(shards, path, err);
    return fsdp_ctl_agree(job->ctl, st, err);
}
