"""Prints an SPDX 2.3 bill of materials of the image: the binary, what was built into it, the packages installed beside it.

Usage: make_sbom.py BINARY INSTALLED    INSTALLED: "package<TAB>version<TAB>architecture" lines

What was built in stands in /opt/grpc/sources, if that is there: "name<TAB>version<TAB>address" lines.
"""
import datetime
import hashlib
import json
import pathlib
import re
import subprocess
import sys


BUILT_IN = pathlib.Path("/opt/grpc/sources")


def identifier(text):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", text)


def package(name, version, **more):
    return {"SPDXID": identifier(name), "name": name, "versionInfo": version, "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False, "licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION",
            "copyrightText": "NOASSERTION", **more}


def main():
    binary, installed = map(pathlib.Path, sys.argv[1:])
    version = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]
    digest = hashlib.sha256(binary.read_bytes()).hexdigest()
    packages = [package("meshfill", version, checksums=[{"algorithm": "SHA256", "checksumValue": digest}])]
    for line in BUILT_IN.read_text().splitlines() if BUILT_IN.exists() else []:
        name, number, address = line.split("\t")
        packages.append(package(f"{name}-source", number, downloadLocation=f"git+{address}@{number}"))
    for line in installed.read_text().splitlines():
        name, number, architecture = line.split("\t")
        locator = f"pkg:deb/debian/{name}@{number}?arch={architecture}&distro=debian-12"
        packages.append(package(name, number, externalRefs=[{
            "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": locator}]))
    print(json.dumps({
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": f"meshfill-{version}",
        "documentNamespace": f"urn:meshfill:{digest}",
        "creationInfo": {"created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                         "creators": ["Tool: meshfill/deploy/image/make_sbom.py"]},
        "packages": packages,
        "relationships": [{"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES",
                           "relatedSpdxElement": packages[0]["SPDXID"]}] +
                         [{"spdxElementId": packages[0]["SPDXID"], "relationshipType": "DEPENDS_ON",
                           "relatedSpdxElement": each["SPDXID"]} for each in packages[1:]]}, indent=1))


if __name__ == "__main__":
    main()
