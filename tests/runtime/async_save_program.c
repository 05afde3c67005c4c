/*
 * Saving in the background as a program that is launched, in any way. Without arguments ranks are threads.
 *
 * moment   training continues while the disk waits; the checkpoint has the bytes of one that was saved before
 * lost     the last rank dies while its save is in flight: nothing is published
 */
#include "tests/support/disk/io_fault.h"
#include "tests/support/nets/state_net.h"
#include <fsdp/async_save.h>
#include <fsdp/launch.h>

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { SIZE = 128, LONGEST_MS = 120000 };

typedef struct rank_gate {
    atomic_bool is_open, was_reached;
    fsdp_io *io;
} rank_gate;

/* Every write of this rank waits until it has trained on. */
static int wait_at_gate(void *user, fsdp_io_call call, const char *path)
{
    rank_gate *gate = user;
    (void)call;
    (void)path;
    atomic_store(&gate->was_reached, true);
    for (int i = 0; i < LONGEST_MS && !atomic_load(&gate->is_open); i++)
        usleep(1000);
    return atomic_load(&gate->is_open) ? 0 : -ETIMEDOUT;
}

static fsdp_status make_gate(rank_gate *gate, fsdp_error *err)
{
    const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PWRITE,
                                  .at = 1,
                                  .forever = true,
                                  .action = FSDP_FAULT_CALL,
                                  .call = wait_at_gate,
                                  .user = gate};
    return fsdp_io_fault_create(NULL, &plan, &gate->io, err);
}

static fsdp_status share_folder(fsdp_world *world, char folder[SIZE], fsdp_error *err)
{
    snprintf(folder, SIZE, "/tmp/fsdp-async-XXXXXX");
    if (fsdp_world_rank(world) == 0)
        EXPECT(mkdtemp(folder));
    return fsdp_ctl_broadcast(fsdp_world_ctl(world), 0, folder, SIZE, err);
}

static fsdp_status run_command(const char *what, const char *folder, fsdp_error *err)
{
    char command[3 * SIZE];
    snprintf(command, sizeof command, what, folder);
    EXPECT(system(command) == 0);
    return FSDP_OK;
}

/* Trains on while the save waits at the gate. */
static fsdp_status save_and_train_on(toy *net, rank_gate *gate, bool is_lost, const char *folder,
                                     fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_root_save_opts opts = {0};
    char path[2 * SIZE];
    FSDP_TRY(net_train(net, 2, err));
    snprintf(path, sizeof path, "%s/sync", folder);
    FSDP_TRY(fsdp_root_save(net->root, path, &opts, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    snprintf(path, sizeof path, "%s/async", folder);
    opts.save.access.disk = gate->io;
    FSDP_TRY(fsdp_async_save(saver, path, &opts, err));
    FSDP_TRY(net_train(net, 3, err));
    while (is_lost && !atomic_load(&gate->was_reached))
        usleep(1000);
    if (is_lost && fsdp_world_rank(net->world) == fsdp_world_size(net->world) - 1)
        kill(getpid(), SIGKILL);
    atomic_store(&gate->is_open, true);
    fsdp_status status = fsdp_async_save_wait(saver, NULL, err);
    fsdp_async_saver_free(saver);
    return status;
}

static fsdp_status run_toy(toy *net, bool is_lost, fsdp_error *err)
{
    rank_gate gate = {0};
    char folder[SIZE];
    bool is_first = fsdp_world_rank(net->world) == 0;
    FSDP_TRY(share_folder(net->world, folder, err));
    FSDP_TRY(make_gate(&gate, err));
    fsdp_status status = save_and_train_on(net, &gate, is_lost, folder, err);
    fsdp_io_fault_free(gate.io);
    if (is_lost && is_first) {
        EXPECT(status == FSDP_ERR_PEER);
        FSDP_TRY(run_command("cd %s && test \"$(ls -A)\" = sync", folder, err));
        printf("nothing published: %s\n", err->text);
    } else if (status == FSDP_OK && is_first) {
        FSDP_TRY(run_command("cd %s && diff -r sync async", folder, err));
        printf("%d ranks: the bytes of the call\n", fsdp_world_size(net->world));
    }
    if (is_first)
        FSDP_TRY(run_command("rm -r %s", folder, err));
    return status;
}

static int run_rank(void *user, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    world_rank rank = {.world = world};
    toy net;
    const toy_case what = {1, {fsdp_world_size(world)}, {"dp"}, declare_net, NULL, NULL, {0}};
    const bool is_lost = argc > 1 && strcmp(argv[1], "lost") == 0;
    (void)user;
    if (is_lost)
        signal(SIGTERM, SIG_IGN); /* --np asks the others to end soon, and a busy machine is slow */
    fsdp_status status = net_build(&net, &rank, &what, &err);
    if (status == FSDP_OK)
        status = run_toy(&net, is_lost, &err);
    toy_free(&net);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}

int main(int argc, char **argv)
{
    char *threads[] = {argv[0], (char[]){"--threads"}, (char[]){"3"}, NULL};
    return argc > 1 ? fsdp_launch(argc, argv, run_rank, NULL)
                    : fsdp_launch(3, threads, run_rank, NULL);
}
