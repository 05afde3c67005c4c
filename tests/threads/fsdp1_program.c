/*
 * The FSDP1 face over ranks that are threads: a small MLP is trained with every sharding strategy, prefetch
 * and kind of flat parameter, on both devices, and must give the bits of one rank that runs the microbatches
 * of all one after the other with plain units (hybrid strategies: of the same mesh with plain units). Plain
 * program, so that ThreadSanitizer sees it.
 */
#include "tests/support/nets/training.h"

#include <stdio.h>

static const char *const strategy_names[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD",
                                             "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"};

static bool is_hybrid(fsdp_wrap_strategy strategy)
{
    return strategy >= FSDP_WRAP_HYBRID_SHARD;
}

/* Computes the expected bits. */
static bool run_reference(int ranks, const net_setup *setup, net_result *expected)
{
    fsdp_error err = {0};
    net_setup plain = net_setup_default();
    plain.is_plain = true;
    bool needs_mesh = setup->microbatches > 1 || setup->replicas > 0;
    plain.replicas = setup->replicas;
    plain.microbatches = needs_mesh ? setup->microbatches : ranks;
    plain.all_reduce_each = setup->all_reduce_each;
    plain.divide = needs_mesh ? 0 : ranks;
    plain.clip = setup->clip;
    if (net_run(needs_mesh ? ranks : 1, "cpu", &plain, expected, &err) == FSDP_OK)
        return true;
    printf("reference: %s\n", err.text);
    return false;
}

static bool try_setup(int ranks, const char *device, const net_setup *setup)
{
    static net_result expected, got;
    fsdp_error err = {0};
    const fsdp_wrap_unit_opts *unit = &setup->wrap.unit;
    const char *name = strategy_names[unit->strategy];
    if (!run_reference(ranks, setup, &expected))
        return false;
    if (net_run(ranks, device, setup, &got, &err) != FSDP_OK) {
        printf("%s, %d ranks on %s: %s\n", name, ranks, device, err.text);
        return false;
    }
    if (net_equal(&expected, &got))
        return true;
    printf("%s, %d ranks on %s, prefetch %d%s%s%s, %d microbatches: other bits\n", name, ranks,
           device, (int)unit->backward_prefetch, unit->forward_prefetch ? ", forward" : "",
           setup->wrap.use_orig_params ? ", orig" : "",
           setup->wrap.unlimited_gathers ? ", no limit" : "", setup->microbatches);
    return false;
}

/* Every other setting turns with the number of the run. */
static net_setup setup_of(fsdp_wrap_strategy strategy, fsdp_wrap_prefetch prefetch, int ranks,
                          int number)
{
    net_setup setup = net_setup_default();
    setup.wrap.unit.strategy = strategy;
    setup.wrap.unit.backward_prefetch = prefetch;
    setup.wrap.unit.forward_prefetch = number % 3 == 1;
    setup.wrap.unit.offload_params = number % 5 == 2;
    setup.wrap.use_orig_params = number % 2;
    setup.wrap.unlimited_gathers = number % 4 == 3;
    setup.microbatches = number % 4 == 2 ? 3 : 1;
    setup.all_reduce_each = number % 8 == 2;
    if (is_hybrid(strategy))
        setup.replicas = ranks > 1 ? 2 : 1;
    return setup;
}

int main(void)
{
#ifdef __SANITIZE_THREAD__ /* one rank races with nobody, and its runs take as long */
    static const int ranks[] = {2, 4};
#else
    static const int ranks[] = {1, 2, 4};
#endif
    static const char *const devices[] = {"cpu", "cpu-async"};
    int tried = 0, failed = 0;
    for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++)
        for (size_t d = 0; d < 2; d++)
            for (int strategy = 0; strategy <= FSDP_WRAP_HYBRID_SHARD_ZERO2; strategy++)
                for (int prefetch = 0; prefetch <= FSDP_WRAP_BACKWARD_NONE; prefetch++) {
                    const net_setup setup = setup_of((fsdp_wrap_strategy)strategy,
                                                     (fsdp_wrap_prefetch)prefetch, ranks[r], tried);
                    failed += !try_setup(ranks[r], devices[d], &setup);
                    tried++;
                }
    printf("%d runs, %d failed\n", tried, failed);
    return failed > 0;
}
