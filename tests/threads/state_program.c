/*
 * State dicts between steps, over ranks that are threads, on both devices: live, whole and from rank 0, while
 * streams still have work of the step before. Plain program, so that ThreadSanitizer sees it.
 */
#include "tests/support/nets/state_net.h"

/* One step, and the state goes round: whole to all, to rank 0 alone, and back in three ways. */
static fsdp_status go_round(toy *net, const fsdp_sd *live, fsdp_error *err)
{
    const fsdp_state_opts ways[] = {{.full_state_dict = true},
                                    {.full_state_dict = true, .broadcast_from_rank0 = true},
                                    {.full_state_dict = true, .cpu_offload = true},
                                    {.cpu_offload = true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        fsdp_state_opts opts = ways[i];
        fsdp_sd *before = NULL, *moved = NULL;
        FSDP_TRY(net_train(net, 1, err));
        FSDP_TRY(net_forward(net, err));
        FSDP_TRY(net_get(net, &(fsdp_state_opts){.cpu_offload = true}, &before, err));
        opts.broadcast_from_rank0 = false;
        FSDP_TRY(net_get(net, &opts, &moved, err));
        FSDP_TRY(net_spoil(net, err));
        opts.broadcast_from_rank0 =
            ways[i].broadcast_from_rank0 || (opts.full_state_dict && opts.cpu_offload);
        FSDP_TRY(net_set(net, &opts, moved, err));
        FSDP_TRY(net_expect_equal(before, live, fsdp_world_rank(net->rank->world), err));
        fsdp_sd_free(moved);
        fsdp_sd_free(before);
    }
    return FSDP_OK;
}

static fsdp_status run(toy *net, fsdp_error *err)
{
    fsdp_sd *live = NULL;
    FSDP_TRY(net_get(net, NULL, &live, err));
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 2 && status == FSDP_OK; i++)
        status = go_round(net, live, err);
    fsdp_sd_free(live);
    return status;
}

int main(void)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    int failed = 0;
    for (int64_t ranks = 1; ranks <= 4; ranks++)
        for (int d = 0; d < 2; d++) {
            fsdp_error err = {0};
            const toy_case what = {1, {ranks}, {"dp"}, declare_net, run, NULL, {0}};
            if (net_run_on(devices[d], what, &err) == FSDP_OK)
                continue;
            printf("%lld ranks on %s: %s\n", (long long)ranks, devices[d], err.text);
            failed++;
        }
    printf("%d failed\n", failed);
    return failed > 0;
}
