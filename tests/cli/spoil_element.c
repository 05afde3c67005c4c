/* Saves a checkpoint again with one byte of one element changed and every checksum right.
 * usage: spoil_element FROM TO NAME ELEMENT */
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fsdp_status spoil(fsdp_sd *sd, const char *name, long element, fsdp_error *err)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    if (at < 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "no tensor '%s'", name);
    const fsdp_entry *entry = fsdp_sd_at(sd, (size_t)at);
    char *data = entry->data;
    data[(size_t)element * fsdp_dtype_size(entry->dtype)] ^= 1;
    return FSDP_OK;
}

static fsdp_status run(char **argv, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    fsdp_ctl *ctl = NULL;
    fsdp_save_opts save = {0};
    const int64_t step = 100;
    save.step = &step;
    FSDP_TRY(fsdp_load_full(argv[1], NULL, &sd, err));
    FSDP_TRY(fsdp_ctl_self(&ctl, err));
    FSDP_TRY(spoil(sd, argv[3], atol(argv[4]), err));
    FSDP_TRY(fsdp_sd_save(sd, ctl, argv[2], &save, err));
    fsdp_ctl_free(ctl);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_error err = {0};
    if (argc != 5)
        return 2;
    return run(argv, &err) == FSDP_OK ? 0 : fsdp_error_report(&err);
}
