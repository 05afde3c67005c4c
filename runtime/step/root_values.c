/*
 * Parameters that have no values yet, for programs that ask for an error when one is used (a model on
 * PyTorch's meta device raises one). See fsdp_root_expect_values.
 */
#include "runtime/step/step_internal.h"

#include <string.h>

#include "statedict/sd/names.h"

#include "base/core/given.h"

fsdp_status fsdp_root_expect_values(fsdp_root *root, fsdp_error *err)
{
    FSDP_NEED(err, root);
    const fsdp_model *model = root->model;
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "values are expected between steps, not inside one");
    if (root->declared != root->model)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the parameters of this root are in flat parameters, which get values as "
                         "a whole: call fsdp_root_init or fsdp_root_load");
    for (size_t i = 0; i < model->count; i++)
        model->params[i]->lacks_value = !model->params[i]->is_buffer;
    return FSDP_OK;
}

void fsdp_root_note_values(const fsdp_root *root)
{
    for (size_t i = 0; i < root->model->count; i++)
        root->model->params[i]->lacks_value = false;
}

static fsdp_status report(const char *call, const fsdp_name_list *names, fsdp_error *err)
{
    fsdp_text text = {0};
    (void)fsdp_names_append(names, "missing", &text);
    fsdp_status status = fsdp_fail(err, FSDP_ERR_USAGE,
                                   "%s came before all parameters had values%s; fsdp_root_init, "
                                   "fsdp_root_set_state and fsdp_root_load set them",
                                   call, text.data ? text.data : "");
    fsdp_text_release(&text);
    return status;
}

fsdp_status fsdp_root_check_values(const fsdp_root *root, const fsdp_unit *unit, const char *call,
                                   fsdp_error *err)
{
    const fsdp_model *model = root->model;
    fsdp_name_list names = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < model->count && status == FSDP_OK; i++) {
        const fsdp_param *param = model->params[i];
        if (param->lacks_value && (!unit || param->unit == unit) &&
            !fsdp_names_add(&names, param->name, strlen(param->name)))
            status = fsdp_fail_memory(err, param->name);
    }
    if (status == FSDP_OK && names.count > 0)
        status = report(call, &names, err);
    fsdp_names_release(&names);
    return status;
}
