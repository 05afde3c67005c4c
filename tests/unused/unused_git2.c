/* The functions of libgit2 that libcriterion calls: it begins and ends in the process of every test. Only the
 * asserts of criterion/new make a diff, and no test includes them. */
#include <stdlib.h>

int git_libgit2_init(void);
int git_libgit2_shutdown(void);
_Noreturn void git_diff_buffers(void);

int git_libgit2_init(void)
{
    return 1;
}

int git_libgit2_shutdown(void)
{
    return 0;
}

void git_diff_buffers(void)
{
    abort();
}
