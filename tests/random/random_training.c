/*
 * A random configuration of training, run in any way that fsdp_launch knows; random_training.py starts it and
 * compares what runs print:
 *
 *   same ...       every rank, and one alone where that is promised
 *   near ...       the same, but of one rank alone only nearly
 *   part ...       each rank its own number; those of all ranks add up to that of one rank alone
 *   promised       one rank alone must have the same bits
 *   wrong: ...     gradients are not the mean of what was given, or gathered is not what shards hold
 *
 * usage: random_training SEED [alone=RANKS] [pools=off|on|mixed] [detours] [save=DIR | load=DIR] [describe]
 *                        [LAUNCH OPTION ...]
 *
 * With detours it does on the way what must change nothing: state dicts are got and set, and microbatches are
 * begun and left. `describe` says what was drawn.
 */
#include "tests/random/trainer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct run_plan {
    uint64_t seed;
    int alone; /* 0, or whose microbatches one rank runs */
    net_pools pools;
    const char *save, *load;
    bool has_detours, describes;
} run_plan;

static bool read_argument(run_plan *plan, const char *text)
{
    static const char *const pools[] = {"pools=off", "pools=on", "pools=mixed"};
    for (int i = 0; i < 3; i++)
        if (strcmp(text, pools[i]) == 0) {
            plan->pools = (net_pools)i;
            return true;
        }
    if (strncmp(text, "alone=", 6) == 0)
        plan->alone = atoi(text + 6);
    else if (strncmp(text, "save=", 5) == 0)
        plan->save = text + 5;
    else if (strncmp(text, "load=", 5) == 0)
        plan->load = text + 5;
    else if (strcmp(text, "detours") == 0)
        plan->has_detours = true;
    else if (strcmp(text, "describe") == 0)
        plan->describes = true;
    else
        return false;
    return true;
}

static bool read_plan(run_plan *plan, int argc, char **argv)
{
    char *end = NULL;
    *plan = (run_plan){.seed = argc > 1 ? strtoull(argv[1], &end, 10) : 0};
    bool is_good = end && *end == '\0';
    for (int i = 2; i < argc; i++)
        is_good = read_argument(plan, argv[i]) && is_good;
    return is_good;
}

/* Nothing of what was gathered before stays. */
static fsdp_status load(trainer *t, random_net *net, const run_plan *plan, fsdp_error *err)
{
    FSDP_TRY(trainer_evaluate(t, err));
    FSDP_TRY(net_load(net, plan->load, err));
    return trainer_evaluate(t, err);
}

static fsdp_status run(trainer *t, random_net *net, const run_plan *plan, fsdp_error *err)
{
    uint64_t hash = 0;
    size_t count = 0;
    FSDP_TRY(net_tune(net, err));
    t->pools = plan->pools;
    t->has_detours = plan->has_detours;
    FSDP_TRY(trainer_create(t, net, err));
    FSDP_TRY(plan->load ? load(t, net, plan, err) : trainer_run(t, err));
    FSDP_TRY(net_hash_state(net, &hash, &count, err));
    printf("same state: %zu %016" PRIx64 "\n", count, hash);
    return plan->save ? net_save(net, plan->save, err) : FSDP_OK;
}

static void draw(training_case *c, fsdp_world *world, const run_plan *plan)
{
    case_draw(c, plan->seed, plan->alone ? plan->alone : fsdp_world_size(world));
    if (plan->alone)
        case_make_alone(c);
    if (fsdp_world_rank(world) > 0)
        return;
    if (plan->describes)
        case_print(c);
    if (case_promises_bits(c))
        printf("promised\n");
}

static int run_rank(void *user, fsdp_world *world, int argc, char **argv)
{
    (void)user;
    run_plan plan;
    if (!read_plan(&plan, argc, argv) || (plan.alone && fsdp_world_size(world) > 1)) {
        fprintf(stderr, "usage: random_training SEED [alone=RANKS] [pools=off|on|mixed] "
                        "[detours] [save=DIR | load=DIR] [describe]\n");
        return 2;
    }
    struct {
        training_case c;
        random_net net;
        trainer trainer;
    } *all = calloc(1, sizeof *all);
    if (!all)
        return FSDP_ERR_LIMIT;
    fsdp_error err = {0};
    all->net.is_described = plan.describes;
    all->net.is_to_load = plan.load != NULL;
    draw(&all->c, world, &plan);
    if (net_create(&all->net, world, &all->c, &err) == FSDP_OK &&
        run(&all->trainer, &all->net, &plan, &err) == FSDP_OK && all->trainer.wrong > 0)
        fsdp_fail(&err, FSDP_ERR_INTERNAL, "%d results are wrong", all->trainer.wrong);
    trainer_release(&all->trainer);
    toy_free(&all->net.toy);
    free(all);
    return fsdp_error_report(&err);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    return fsdp_launch(argc, argv, run_rank, NULL);
}
