/* The rules of --dtype and --dtype-for: they decide the dtype of every tensor in a conversion. */
#ifndef FSDP_CAST_RULES_H
#define FSDP_CAST_RULES_H

#include <fsdp/convert.h>

typedef struct fsdp_cast_rules fsdp_cast_rules;

/* FSDP_ERR_USAGE for a malformed rule or a dtype that casts cannot produce. */
fsdp_status fsdp_cast_rules_create(const fsdp_select_opts *opts, fsdp_cast_rules **rules_out,
                                   fsdp_error *err);
void fsdp_cast_rules_free(fsdp_cast_rules *rules); /* accepts NULL */

/* The dtype of the result. FSDP_DTYPE_NONE when a rule demands a cast that `dtype` does not allow. */
fsdp_dtype fsdp_cast_rules_decide(const fsdp_cast_rules *rules, const char *name, size_t name_size,
                                  fsdp_dtype dtype, bool is_optim);

#endif
