/* Tensors that a format has in f32 whatever the type of the others is (caps.f32_vectors). */
#ifndef FSDP_VECTORS_H
#define FSDP_VECTORS_H

#include <fsdp/sd.h>

/* Tells whether the tensor is one that llama.cpp adds or multiplies element by element: of fewer than two
 * dims, or biases of several experts, norms of several groups, types of tokens, numbers of a
 * state. */
bool fsdp_is_vector(const fsdp_entry *entry);

#endif
