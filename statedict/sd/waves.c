/* Tensors that share memory in turns. See waves.h. */
#include "statedict/sd/waves.h"

size_t fsdp_waves_find(const fsdp_waves *waves, size_t entry)
{
    size_t low = 0, high = waves ? waves->count : 0;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (waves->first[middle] <= entry)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static fsdp_status enter_until(fsdp_waves *waves, size_t end, fsdp_error *err)
{
    while (waves->entered < end) {
        FSDP_TRY(waves->enter(waves->context, waves->entered, err));
        waves->entered++;
    }
    return FSDP_OK;
}

fsdp_status fsdp_waves_reach(fsdp_waves *waves, size_t entry, fsdp_error *err)
{
    return waves ? enter_until(waves, fsdp_waves_find(waves, entry) + 1, err) : FSDP_OK;
}

fsdp_status fsdp_waves_finish(fsdp_waves *waves, fsdp_error *err)
{
    return waves ? enter_until(waves, waves->count, err) : FSDP_OK;
}
