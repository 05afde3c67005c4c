/* Parameters of units for tests: values and gradients as f32, for every stored dtype. */
#ifndef FSDP_TENSORS_H
#define FSDP_TENSORS_H

#include <fsdp/root.h>

/* Sets the gradient of this backward, rounded to its dtype. */
fsdp_status tensor_give_grad(fsdp_param *param, const float *grad, fsdp_error *err);

/* Compares this rank's rows with those of a whole tensor. tolerance 0: equal bits; else the largest distance,
 * relative to values above one. */
fsdp_status expect_shard(fsdp_param *param, const float *whole, double tolerance, fsdp_error *err);
fsdp_status expect_shard_grad(fsdp_param *param, const float *whole, double tolerance, fsdp_error *err);

/* Copies this rank's rows to their place in a whole tensor; zeros without a gradient. */
void keep_shard(fsdp_param *param, float *whole);
void keep_shard_grad(fsdp_param *param, float *whole);

/* Advances to the next element of a box in row-major order; false after the last one. */
bool next_element(const fsdp_box *box, int64_t *at);
/* First values for fsdp_root_init, f32: every element is its position in the whole tensor, plus one. */
fsdp_status tensor_number(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                          fsdp_error *err);

bool are_close(double a, double b, double tolerance);

#endif
