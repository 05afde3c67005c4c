/* fsdp-convert's reports on casts. See convert_tool.h. */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void convert_add_casts(fsdp_text *text, const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    fsdp_text_addf(text, "  cast %s: ", cli_plural(plan->cast_tensors, "tensor", number));
    for (int i = 0; i < plan->cast_pairs; i++)
        fsdp_text_addf(text, "%s%" PRId64 " %s -> %s", i > 0 ? ", " : "", plan->casts[i].tensors,
                       fsdp_dtype_name(plan->casts[i].from), fsdp_dtype_name(plan->casts[i].to));
    if (plan->optim_uncast > 0)
        fsdp_text_addf(text, "; %" PRId64 " of the optimizer stay%s (--dtype-for casts them)",
                       plan->optim_uncast, plan->optim_uncast == 1 ? "s" : "");
    fsdp_text_add(text, "\n", 1);
}

void convert_add_casts_json(fsdp_text *text, const convert_options *opts,
                            const fsdp_convert_plan *plan)
{
    const fsdp_cast_report *cast = &opts->cast;
    fsdp_text_addf(text, "\"cast\": {\"tensors\": %" PRId64 ", \"types\": [", plan->cast_tensors);
    for (int i = 0; i < plan->cast_pairs; i++)
        fsdp_text_addf(text, "%s{\"from\": \"%s\", \"to\": \"%s\", \"tensors\": %" PRId64 "}",
                       i > 0 ? ", " : "", fsdp_dtype_name(plan->casts[i].from),
                       fsdp_dtype_name(plan->casts[i].to), plan->casts[i].tensors);
    fsdp_text_addf(text, "]");
    if (!opts->plan) {
        fsdp_text_addf(text,
                       ", \"overflow\": %" PRId64 ", \"nan\": %" PRId64 ", \"underflow\": %" PRId64
                       ", \"max_rel_rounding\": ",
                       cast->overflows, cast->nans, cast->underflows);
        fsdp_text_add_f64(text, cast->max_rounding);
    }
    fsdp_text_addf(text, "},\n ");
}

void convert_add_cast_result(fsdp_text *text, const fsdp_cast_report *cast)
{
    fsdp_text_addf(text, "%" PRId64 " overflow, ", cast->overflows);
    if (cast->underflows > 0)
        fsdp_text_addf(text, "%" PRId64 " underflow, ", cast->underflows);
    fsdp_text_addf(text, "%" PRId64 " NaN, max rel rounding %.1e, ", cast->nans,
                   cast->max_rounding);
}

/* Adds an option with the number rounded up to one digit. */
static void add_bound(fsdp_text *text, const char *option, double number)
{
    char spelled[40];
    int exponent = (int)floor(log10(number));
    int digit = (int)ceil(number / pow(10, exponent));
    for (digit = digit > 1 ? digit - 1 : 1;; digit++) {
        snprintf(spelled, sizeof spelled, "%de%d", digit, exponent);
        if (strtod(spelled, NULL) >= number)
            break;
    }
    if (digit == 10)
        snprintf(spelled, sizeof spelled, "1e%d", exponent + 1);
    fsdp_text_addf(text, " %s %s", option, spelled);
}

/* fsdp-diff compares with the new value: |new - old| / |new| may be larger than with the old one, but, as
 * rounding moves by half a step at most, no more than a half. */
static double error_of_new(double rounding)
{
    double most = 0.5;
    return rounding < most && rounding / (1 - rounding) < most ? rounding / (1 - rounding) : most;
}

void convert_add_tolerance(fsdp_text *text, const fsdp_cast_report *cast)
{
    if (cast->max_rounding > 0)
        add_bound(text, "--rtol", error_of_new(cast->max_rounding));
    if (cast->max_underflow > 0)
        add_bound(text, "--atol", cast->max_underflow);
}
