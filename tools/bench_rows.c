#include "tools/bench.h"
fsdp_status bench_measure(const bench_options *opts, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s is not measured yet", opts->command);
}
