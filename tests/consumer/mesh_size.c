/* A first program of a user; both consumer projects build it. */
#include <fsdp/fsdp.h>
#include <stdio.h>

int main(void)
{
    fsdp_error err = {0};
    fsdp_mesh *mesh = NULL;
    const int64_t shape[] = {2, 3};
    const char *names[] = {"dp", "tp"};
    if (fsdp_mesh_create(2, shape, names, NULL, &mesh, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    printf("a mesh of %lld ranks\n", (long long)fsdp_mesh_size(mesh));
    fsdp_mesh_free(mesh);
    return 0;
}
