/* The example of the README: 4 ranks (threads) save a tensor, 6 ranks load it. */
#include <fsdp/fsdp.h>

/* One rank: declares a 1000 x 64 tensor that is cut by rows, then saves or loads its part. */
static fsdp_status rank_body(void *save, fsdp_ctl *ctl, fsdp_error *err)
{
    int64_t ranks = fsdp_ctl_size(ctl), shape[] = {1000, 64};
    fsdp_placement rows = {.kind = FSDP_SHARD, .dim = 0};
    fsdp_mesh *mesh = NULL;
    fsdp_sd *sd = NULL;
    fsdp_status st = fsdp_mesh_create(1, &ranks, (const char *[]){"dp"}, NULL, &mesh, err);
    if (st == FSDP_OK)
        st = fsdp_sd_create(&sd, err);
    if (st == FSDP_OK)
        st = fsdp_sd_add_tensor(sd, FSDP_NAME("w"),
                                &(fsdp_tensor){.dtype = FSDP_F32, .ndim = 2, .shape = shape,
                                               .layout = {.mesh = mesh, .placement = {rows}}},
                                err);
    if (st == FSDP_OK)
        st = fsdp_sd_allocate(sd, fsdp_ctl_rank(ctl), err); /* or bring your own memory */
    if (st == FSDP_OK)
        st = save ? fsdp_sd_save(sd, ctl, "state", NULL, err)
                  : fsdp_sd_load(sd, ctl, "state", NULL, err);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
    return st;
}

int main(void)
{
    fsdp_error err = {0};
    if (fsdp_ctl_run_threads(4, rank_body, "save", &err) != FSDP_OK ||
        fsdp_ctl_run_threads(6, rank_body, NULL, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    return 0;
}
