/* Which dtype a tensor gets in a conversion: what --dtype and --dtype-for say. */
#ifndef FSDP_CAST_RULES_H
#define FSDP_CAST_RULES_H

#include <fsdp/convert.h>

typedef struct fsdp_cast_rules fsdp_cast_rules;

/* FSDP_ERR_USAGE for a rule that is none, and for a dtype that cannot be cast to. */
fsdp_status fsdp_cast_rules_create(const fsdp_select_opts *opts, fsdp_cast_rules **rules_out,
                                   fsdp_error *err);
void fsdp_cast_rules_free(fsdp_cast_rules *rules); /* accepts NULL */

/* FSDP_DTYPE_NONE when a rule wants it cast and its dtype cannot be. */
fsdp_dtype fsdp_cast_rules_decide(const fsdp_cast_rules *rules, const char *name, size_t name_size,
                                  fsdp_dtype dtype, bool is_optim);

#endif
