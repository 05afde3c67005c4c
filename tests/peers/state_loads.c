/*
 * Loads checkpoints of one small net into roots of 1 to 3 ranks, and prints all of its state.
 * torch_state_dicts.py runs it on what PyTorch has saved.
 *
 * usage: state_loads CHECKPOINT...
 */
#include "tests/support/nets/state_net.h"

static fsdp_status declare(toy *net, fsdp_error *err)
{
    fsdp_param *embed, *bias;
    FSDP_TRY(net_add(net, "embed.weight", 2, (int64_t[]){9, 4}, &embed, err));
    FSDP_TRY(net_add(net, "layers.0.weight", 2, (int64_t[]){5, 4}, NULL, err));
    FSDP_TRY(net_add(net, "layers.0.bias", 1, (int64_t[]){5}, NULL, err));
    FSDP_TRY(net_add(net, "layers.1.weight", 2, (int64_t[]){3, 5}, NULL, err));
    FSDP_TRY(net_add(net, "layers.1.bias", 1, (int64_t[]){3}, &bias, err));
    FSDP_TRY(fsdp_param_set_requires_grad(bias, false, err));
    FSDP_TRY(fsdp_model_add_alias(net->model, "head.weight", embed, err));
    FSDP_TRY(fsdp_model_add(
        net->model, &(fsdp_param_spec){.name = "count", .dtype = FSDP_I64, .is_buffer = true}, NULL,
        err));
    FSDP_TRY(net_unit(net, "layers.0", err));
    return net_unit(net, "layers.1", err);
}

static void print_entry(const fsdp_sd *sd, const fsdp_entry *entry)
{
    const fsdp_entry *tensor =
        entry->kind == FSDP_ENTRY_ALIAS ? fsdp_sd_at(sd, entry->target) : entry;
    printf("%s", entry->name);
    for (int64_t i = 0; tensor->dtype == FSDP_F32 && i < fsdp_entry_bytes(tensor) / 4; i++)
        printf(" %.17g", (double)((const float *)tensor->data)[i]);
    if (tensor->dtype == FSDP_I64)
        printf(" %lld", (long long)*(const int64_t *)tensor->data);
    if (entry->value.kind == FSDP_VALUE_F64)
        printf(" %.17g", entry->value.as.f64);
    printf("\n");
}

static fsdp_status load(toy *net, fsdp_error *err)
{
    fsdp_sd *full = NULL;
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(fsdp_root_load(net->root, net->user, NULL, err));
    FSDP_TRY(net_get(net, &(fsdp_state_opts){.full_state_dict = true}, &full, err));
    for (size_t i = 0; i < fsdp_sd_count(full) && fsdp_world_rank(net->rank->world) == 0; i++)
        print_entry(full, fsdp_sd_at(full, i));
    fsdp_sd_free(full);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        for (int64_t ranks = 1; ranks <= 3; ranks++) {
            const toy_case what = {1, {ranks}, {"dp"}, declare, load, argv[i], {0}};
            fsdp_error err = {0};
            printf("checkpoint %s %lld\n", argv[i], (long long)ranks);
            if (net_run_on("cpu", what, &err) != FSDP_OK)
                return fsdp_error_report(&err);
        }
    return 0;
}
