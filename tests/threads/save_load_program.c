/*
 * Saving and loading with ranks as threads and several workers each, for the thread sanitizer: every
 * kind, raw and encoded, cooperative loads, gathering, conversion and verifying.
 */
#include "tests/support/sample_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEED = 7 };

typedef struct round_trip {
    const char *path;
    fsdp_save_opts save;
    fsdp_load_opts load;
    int variant;
} round_trip;

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const round_trip *trip = user;
    test_state state;
    FSDP_TRY(test_state_create(&(state_part){.model = STATE_EVERYTHING,
                                             .world = fsdp_ctl_size(ctl),
                                             .rank = fsdp_ctl_rank(ctl),
                                             .variant = trip->variant},
                               true, SEED, &state, err));
    fsdp_status st = fsdp_sd_save(state.sd, ctl, trip->path, &trip->save, err);
    test_state_release(&state);
    return st;
}

static fsdp_status load_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const round_trip *trip = user;
    test_state state;
    fsdp_sd *full = NULL;
    FSDP_TRY(test_state_create(&(state_part){.model = STATE_EVERYTHING,
                                             .world = fsdp_ctl_size(ctl),
                                             .rank = fsdp_ctl_rank(ctl),
                                             .variant = trip->variant},
                               false, SEED, &state, err));
    fsdp_status st = fsdp_sd_load(state.sd, ctl, trip->path, &trip->load, err);
    if (st == FSDP_OK && test_state_differing(&state, SEED) != 0)
        st = fsdp_fail(err, FSDP_ERR_INTERNAL, "loaded bytes differ");
    st = fsdp_ctl_agree(ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_sd_gather_full(state.sd, ctl, &full, err);
    if (st == FSDP_OK && full && test_sd_differing(full, 0, SEED) != 0)
        st = fsdp_fail(err, FSDP_ERR_INTERNAL, "gathered bytes differ");
    fsdp_sd_free(full);
    test_state_release(&state);
    return st;
}

static fsdp_status check_and_convert(const char *path, fsdp_error *err)
{
    char to[4200];
    snprintf(to, sizeof to, "%s-converted", path);
    fsdp_verify_opts verify = {.level = FSDP_VERIFY_DEEP, .threads = 3};
    fsdp_convert_opts convert = {.world = 2, .threads = 3, .memory = 1 << 20};
    FSDP_TRY(fsdp_checkpoint_verify(path, &verify, NULL, err));
    FSDP_TRY(fsdp_checkpoint_convert(path, to, &convert, err));
    return fsdp_checkpoint_verify(to, &verify, NULL, err);
}

static fsdp_status run(const char *directory, fsdp_kind kind, bool compress, fsdp_error *err)
{
    char path[4100];
    snprintf(path, sizeof path, "%s/%d-%d", directory, (int)kind, compress);
    round_trip trip = {.path = path, .load = {.threads = 2}, .variant = 1};
    trip.save.kind = kind;
    trip.save.compress = compress;
    trip.save.threads = 2;
    trip.save.skip_fsync = true;
    FSDP_TRY(fsdp_ctl_run_threads(4, save_rank, &trip, err));
    trip.variant = 2;
    FSDP_TRY(fsdp_ctl_run_threads(3, load_rank, &trip, err));
    return check_and_convert(path, err);
}

int main(void)
{
    char directory[] = "/tmp/fsdp-threads-XXXXXX", command[64];
    fsdp_error err = {0};
    fsdp_status st = FSDP_OK;
    if (!mkdtemp(directory))
        return FSDP_ERR_IO;
    for (int kind = 0; kind < 3 && st == FSDP_OK; kind++)
        for (int compress = 0; compress < 2 && st == FSDP_OK; compress++)
            st = run(directory, (fsdp_kind)kind, compress, &err);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    if (system(command) != 0)
        return FSDP_ERR_IO;
    return fsdp_error_report(&err);
}
