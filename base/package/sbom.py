"""Writes the list of what the packages hold, as SPDX 2.3.

usage: sbom.py VERSION EPOCH SOURCES PACKAGE... >FILE

SOURCES has the source packages of bundled.txt, as apt fetched them. The wheel and the tarball hold what is
compiled of these; the packages of Debian hold fsdp alone, and name the libraries that they need.
"""
import hashlib
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
NONE = "NOASSERTION"


def sha256(path):
    return [{"algorithm": "SHA256", "checksumValue": hashlib.sha256(path.read_bytes()).hexdigest()}]


def bundled_parts(sources):
    for line in (HERE / "bundled.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, source, version, checksum, licence = line.split()
        dsc = sources / f"{source}_{version.split(':')[-1]}.dsc"
        if sha256(dsc)[0]["checksumValue"] != checksum:
            sys.exit(f"sbom: '{dsc}' is not the file that bundled.txt names")
        yield {
            "SPDXID": f"SPDXRef-{name}", "name": name, "versionInfo": version, "packageFileName": dsc.name,
            "supplier": "Organization: Debian", "downloadLocation": NONE, "filesAnalyzed": False,
            "sourceInfo": f"compiled from the source package {source} of Debian 12", "checksums": sha256(dsc),
            "licenseConcluded": licence, "licenseDeclared": licence, "copyrightText": NONE,
            "externalRefs": [{
                "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                "referenceLocator": f"pkg:deb/debian/{source}@{version.replace('+', '%2B')}?arch=source"}],
        }


def package(path, version):
    return {
        "SPDXID": "SPDXRef-" + "".join(c if c.isalnum() else "-" for c in path.name), "name": path.name,
        "versionInfo": version, "packageFileName": path.name, "downloadLocation": NONE,
        "filesAnalyzed": False, "checksums": sha256(path), "licenseConcluded": "Apache-2.0",
        "licenseDeclared": "Apache-2.0", "copyrightText": NONE}


def main(version, epoch, sources, *paths):
    packages = [package(pathlib.Path(path), version) for path in sorted(paths)]
    parts = list(bundled_parts(pathlib.Path(sources)))
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", made["SPDXID"]) for made in packages]
    relations += [(made["SPDXID"], "CONTAINS", part["SPDXID"]) for made in packages for part in parts
                  if not made["name"].endswith(".deb")]
    digest = hashlib.sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest()
    json.dump({
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"fsdp-{version}", "documentNamespace": f"urn:fsdp:{version}:{digest}",
        "creationInfo": {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(epoch))),
            "creators": ["Tool: fsdp-sbom"]},
        "hasExtractedLicensingInfos": [{
            "licenseId": "LicenseRef-HDF5", "name": "HDF5 licence",
            "extractedText": "The text is licenses/hdf5.txt in the wheel and in the tarball."}],
        "packages": packages + parts,
        "relationships": [
            {"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b}
            for a, kind, b in relations],
    }, sys.stdout, indent=1)
    print()


main(*sys.argv[1:])
