/* Criterion initializes libgit2 in the process of every test, and libgit2 then parses the CA certificates of
 * the system: 10 ms of a test's 25 ms, and 33 ms of 95 ms under AddressSanitizer. Only the asserts of
 * criterion/new need libgit2, for diffs; no test includes them. */
int git_libgit2_init(void);
int git_libgit2_shutdown(void);

int git_libgit2_init(void)
{
    return 1;
}

int git_libgit2_shutdown(void)
{
    return 0;
}
