/* Between the table of calls, which null_calls.py writes, and the program that makes them. */
#ifndef FSDP_NULL_CALLS_H
#define FSDP_NULL_CALLS_H

#include <fsdp/fsdp.h>
#include <fsdp/wrap.h>

/* Arguments that a call accepts, or refuses for another reason than NULL. */
typedef struct good_arguments {
    fsdp_world *world;
    fsdp_ctl *ctl;
    fsdp_mesh *mesh;
    fsdp_comm *comm;
    fsdp_comm_handle *comm_handle;
    fsdp_model *model;
    fsdp_param *param;
    fsdp_unit *unit;
    fsdp_unshard_handle *unshard_handle;
    fsdp_root *root;
    fsdp_finalize_handle *finalize_handle;
    fsdp_optim *optim;
    fsdp_scaler *scaler;
    fsdp_async_saver *async_saver;
    fsdp_wrap *wrap;
    fsdp_sd *sd;
    fsdp_checkpoint *checkpoint;
    fsdp_filter *filter;
    fsdp_conversion *conversion;
    void *bytes;
} good_arguments;

typedef struct null_call {
    const char *function, *argument;
    bool is_refused;
    fsdp_status (*call)(good_arguments *good, fsdp_error *why);
} null_call;

extern const null_call null_calls[];
extern const size_t null_call_count;

/* More good arguments: a declaration, and callbacks. */
const fsdp_param_spec *good_param_spec(const good_arguments *good);
fsdp_status good_all_reduce_hook(void *context, void *data, fsdp_dtype dtype, int64_t count, fsdp_error *err);
void good_file_digest_visit(void *context, const char *name, const uint8_t digest[32]);
fsdp_status good_grad_hook(void *context, fsdp_param *param, fsdp_error *err);
fsdp_status good_param_fill(void *context, const fsdp_param *param, const fsdp_box *box, void *data,
                            fsdp_error *err);
fsdp_status good_rank_body(void *context, fsdp_ctl *ctl, fsdp_error *err);
int good_rank_main(void *context, fsdp_world *world, int argc, char **argv);
fsdp_status good_slab_visit(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err);
fsdp_status good_wrap_comm_hook(void *context, fsdp_comm *comm, const fsdp_wrap_bucket *bucket,
                                fsdp_error *err);

#endif
