/* Checkpoints of a root and its optimizer: the live dict (state_get.c), saved and loaded. See state.h. */
#include "runtime/state_internal.h"

fsdp_status fsdp_root_save(fsdp_root *root, fsdp_optim *optim, const char *dir, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    fsdp_sd *sd = NULL;
    fsdp_status status = fsdp_root_state(root, optim, NULL, &sd, err);
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_sd_save(sd, ctl, dir, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

/* Has the checkpoint its hyper-parameters as one list? */
static fsdp_status look_for_list(const char *path, bool *is_list_out, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    FSDP_TRY(fsdp_checkpoint_open(path, NULL, &checkpoint, err));
    *is_list_out =
        fsdp_sd_find(fsdp_checkpoint_sd(checkpoint), FSDP_NAME("optim.param_groups")) >= 0;
    fsdp_checkpoint_close(checkpoint);
    return FSDP_OK;
}

/* Collective: the form in which hyper-parameters are stored. */
static fsdp_status choose_form(fsdp_ctl *ctl, fsdp_optim *optim, const char *path,
                               fsdp_state_opts *opts_out, fsdp_status mine, fsdp_error *err)
{
    bool is_list = false;
    if (mine == FSDP_OK && optim && fsdp_ctl_rank(ctl) == 0)
        mine = look_for_list(path, &is_list, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, mine, err));
    FSDP_TRY(fsdp_ctl_broadcast(ctl, 0, &is_list, sizeof is_list, err));
    *opts_out = (fsdp_state_opts){.nested_optim = is_list};
    return FSDP_OK;
}

fsdp_status fsdp_root_load(fsdp_root *root, fsdp_optim *optim, const char *path, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    const fsdp_load_opts without = {.exclude = "^optim\\."};
    fsdp_state_opts opts;
    fsdp_sd *sd = NULL;
    FSDP_TRY(choose_form(ctl, optim, path, &opts, fsdp_state_settle_to_set(root, err), err));
    fsdp_status status = fsdp_root_state(root, optim, &opts, &sd, err);
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_sd_load(sd, ctl, path, optim ? NULL : &without, err);
    if (status == FSDP_OK)
        status = fsdp_root_take_state(root, optim, &opts, sd, err);
    fsdp_sd_free(sd);
    return status;
}
