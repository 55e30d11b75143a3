#!/usr/bin/env bash
# Installs apptainer on Debian 12, which has no package of it: the binaries of the unstable suite, with a C library of their own beside them.
# Needs root, the packages in apt.txt and the machine's own Debian mirror. When that fails, tests that need apptainer are skipped.
set -euo pipefail
if command -v apptainer > /dev/null; then exit 0; fi

mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep '/debian$' | head -n 1)
if [ -z "$mirror" ]; then echo "no Debian mirror in the package sources of this machine" >&2; exit 1; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work"/{etc/preferences.d,lists/partial,cache/archives/partial,packages,libc,tree}
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" > "$work/etc/sources.list"
options=(-qq -o "Dir::Etc=$work/etc" -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root
    -o Dir::State::status=/var/lib/dpkg/status -o Acquire::Languages=none
    -o Acquire::Check-Valid-Until=false) # unstable goes out of date within a week, a mirror may lag behind; signatures are checked all the same
apt-get "${options[@]}" update
(cd "$work/packages" && apt-get "${options[@]}" download apptainer libc6 libseccomp2)

cd "$work"
dpkg-deb -R packages/apptainer_*.deb tree
for package in packages/libc6_*.deb packages/libseccomp2_*.deb; do dpkg-deb -x "$package" libc; done
private=usr/lib/apptainer-private
mkdir -p "tree/$private"
for name in libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libresolv.so.2 libnss_files.so.2 libnss_dns.so.2 libseccomp.so.2 \
    ld-linux-x86-64.so.2; do
    cp -L "$(find libc -name "$name" | head -n 1)" "tree/$private/$name"
done
find tree/usr -type f -perm -100 ! -path "tree/$private/*" | while read -r program; do
    if file -b "$program" | grep -q 'ELF.*dynamically linked'; then
        patchelf --set-interpreter "/$private/ld-linux-x86-64.so.2" --set-rpath "/$private" "$program"
    fi
done
sed -i -e '/^Built-Using/d; /^Static-Built-Using/d; /^Recommends/d' -e 's/^Version: .*/&+private/' \
    -e 's/^Depends: .*/Depends: ca-certificates, squashfs-tools, uidmap/' tree/DEBIAN/control
rm -rf tree/DEBIAN/md5sums tree/usr/share/doc tree/usr/share/man
dpkg-deb --root-owner-group -Zgzip -z1 -b tree apptainer.deb > /dev/null
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends ./apptainer.deb > /dev/null
apptainer --version
