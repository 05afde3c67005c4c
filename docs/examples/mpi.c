/* Ranks over MPI: mpirun -n 4 ./mpi. Link fsdp and fsdp_mpi. */
#include <fsdp/ctl_mpi.h>
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <unistd.h>

static fsdp_status save(fsdp_ctl *ctl, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    fsdp_value step = fsdp_value_i64(1200);
    FSDP_TRY(fsdp_sd_create(&sd, err));
    fsdp_status st = fsdp_sd_add_value(sd, FSDP_NAME("step"), &step, err);
    if (st == FSDP_OK)
        st = fsdp_sd_save(sd, ctl, "ckpt-mpi", NULL, err);
    fsdp_sd_free(sd);
    return st;
}

int main(void)
{
    fsdp_error err = {0};
    fsdp_ctl *ctl = NULL;
    if (fsdp_ctl_mpi_world(&ctl, &err) == FSDP_OK && save(ctl, &err) == FSDP_OK)
        puts("saved");
    int code = fsdp_error_report(&err);
    fsdp_ctl_free(ctl);
    if (!fsdp_mpi_finalize())
        _exit(code); /* a rank is lost: MPI cannot be ended */
    return code;
}
