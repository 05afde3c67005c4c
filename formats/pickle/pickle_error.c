/* Errors of the pickle machine, with the place in the pickle. See pickle.h. */
#include "formats/pickle/pickle_vm.h"

fsdp_status pickle_fail(pickle_vm *vm, fsdp_status status, const char *why)
{
    return fsdp_fail(vm->err, status, "%s: pickle, byte %lld: %s", vm->options->where,
                     (long long)(vm->options->offset + (vm->opcode - vm->data)), why);
}

fsdp_status pickle_no_memory(pickle_vm *vm)
{
    return fsdp_fail(vm->err, FSDP_ERR_LIMIT, "%s: cannot allocate memory for a pickle",
                     vm->options->where);
}
