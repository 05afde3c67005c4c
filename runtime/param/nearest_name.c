/* The nearest name to one that does not exist. See nearest_name.h. */
#include "runtime/param/nearest_name.h"

#include <string.h>

#include "runtime/param/param.h"

static int least(int a, int b)
{
    return a < b ? a : b;
}

/* The edit distance: letters to change, add or leave out. One row of the table is kept. */
static int distance_between(const char *a, size_t size_a, const char *b, size_t size_b)
{
    int row[FSDP_NEAREST_NAME + 1];
    for (size_t k = 0; k <= size_b; k++)
        row[k] = (int)k;
    for (size_t i = 1; i <= size_a; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t k = 1; k <= size_b; k++) {
            int change = diagonal + (a[i - 1] != b[k - 1]);
            diagonal = row[k];
            row[k] = least(change, 1 + least(row[k], row[k - 1]));
        }
    }
    return row[size_b];
}

void fsdp_nearest_name_offer(fsdp_nearest_name *nearest, const char *name, size_t size)
{
    size_t wanted = strlen(nearest->wanted);
    if (size == 0 || size > FSDP_NEAREST_NAME || wanted > FSDP_NEAREST_NAME)
        return;
    int distance = distance_between(nearest->wanted, wanted, name, size);
    if (nearest->name[0] && distance >= nearest->distance)
        return;
    nearest->distance = distance;
    memcpy(nearest->name, name, size);
    nearest->name[size] = '\0';
}

static void offer_modules_of(fsdp_nearest_name *nearest, const char *name)
{
    for (const char *dot = strchr(name, '.'); dot; dot = strchr(dot + 1, '.'))
        fsdp_nearest_name_offer(nearest, name, (size_t)(dot - name));
}

void fsdp_nearest_name_offer_param(fsdp_nearest_name *nearest, const fsdp_param *param)
{
    fsdp_nearest_name_offer(nearest, param->name, strlen(param->name));
    for (size_t i = 0; i < param->alias_count; i++)
        fsdp_nearest_name_offer(nearest, param->aliases[i], strlen(param->aliases[i]));
}

void fsdp_nearest_name_offer_modules(fsdp_nearest_name *nearest, const fsdp_param *param)
{
    offer_modules_of(nearest, param->name);
    for (size_t i = 0; i < param->alias_count; i++)
        offer_modules_of(nearest, param->aliases[i]);
}
