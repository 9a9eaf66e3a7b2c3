#!/bin/sh
# finish.sh ROOT HERE OUT EPOCH: makes the installed packages in ROOT a desktop with the files of HERE, and its kernel and initrd in OUT.
set -eu
root=$1 here=$2 out=$3 epoch=$4
export LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin

# what a virtual machine has no use for
kernel=$(basename "$(ls -d "$root"/lib/modules/*)")
modules=$root/lib/modules/$kernel/kernel
for part in sound net/wireless net/bluetooth net/mac80211 net/can drivers/net/wireless drivers/net/ethernet drivers/net/can \
  drivers/net/usb drivers/net/wwan drivers/bluetooth drivers/media drivers/infiniband drivers/iio drivers/staging drivers/isdn \
  drivers/scsi drivers/gpu/drm/amd drivers/gpu/drm/i915 drivers/gpu/drm/nouveau drivers/gpu/drm/radeon drivers/gpu/drm/vmwgfx \
  drivers/mtd drivers/hwmon drivers/md drivers/platform drivers/thunderbolt drivers/target drivers/firewire drivers/ata drivers/edac \
  drivers/mmc drivers/power drivers/crypto drivers/nvme drivers/comedi fs/xfs fs/btrfs fs/ocfs2 fs/gfs2 fs/ceph fs/nfs fs/nfsd fs/smb \
  fs/f2fs fs/jfs fs/reiserfs fs/afs fs/dlm fs/orangefs fs/ubifs fs/nilfs2; do
  rm -rf "$modules/$part"
done
depmod -b "$root" "$kernel"
rm -rf "$root"/usr/lib/x86_64-linux-gnu/libLLVM* "$root"/usr/lib/x86_64-linux-gnu/dri  # no OpenGL here

# our files and the user
mkdir -p "$root"/home/user/.config/openbox "$root"/home/user/Desktop "$root"/home/user/Documents "$root"/home/user/Downloads
cp -r "$here"/overlay/. "$root"/
chmod 755 "$root"/usr/sbin/desktop-init "$root"/usr/bin/desktop-session
echo desktop >"$root"/etc/hostname
echo '127.0.0.1 localhost desktop' >"$root"/etc/hosts
echo 'nameserver 10.0.2.3' >"$root"/etc/resolv.conf
echo '7072616374696365706f6f6c64657368' >"$root"/etc/machine-id
mkdir -p "$root"/var/lib/dbus
cp "$root"/etc/machine-id "$root"/var/lib/dbus/machine-id
chroot "$root" useradd -M -u 1000 -U -G sudo -s /bin/bash -p '$6$practice$A3gzsGD3JO1.0XVyjjUSjl01OV7NK14d6/36a.A6CHd7YmLiuJSm3NY5bi003TANeMnqnXbkC02ZrFfu1DOga1' user # password
sed 's|<animateIconify>yes|<animateIconify>no|' "$root"/etc/xdg/openbox/rc.xml >"$root"/home/user/.config/openbox/rc.xml
cp "$root"/etc/skel/.bashrc "$root"/etc/skel/.profile "$root"/home/user/
chroot "$root" chown -R 1000:1000 /home/user

# caches that would else be made at every start; fontconfig compares times to the nanosecond, which a disk image does not keep
# (it follows links, within the image: so does touch)
chroot "$root" find -L /usr/share/fonts /usr/local/share/fonts -type d -exec touch -d "@$epoch" {} +
rm -rf "$root"/var/cache/fontconfig/*
chroot "$root" fc-cache -f -s
for theme in hicolor Adwaita; do
  [ ! -d "$root/usr/share/icons/$theme" ] || chroot "$root" gtk-update-icon-cache -q -f "/usr/share/icons/$theme" || true
done
chroot "$root" glib-compile-schemas /usr/share/glib-2.0/schemas
chroot "$root" python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/practice /usr/lib/python3/dist-packages/pyautogui.py

# what differs from build to build, or is not wanted
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/log/* "$root"/var/cache/ldconfig/aux-cache "$root"/tmp/* \
  "$root"/run/* "$root"/var/cache/debconf/*-old "$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow- \
  "$root"/initrd.img* "$root"/var/lib/dpkg/*-old "$root"/etc/apt/sources.list* "$root"/etc/apt/apt.conf.d/99mmdebstrap
find "$root"/dev -mindepth 1 -delete
sed -i "s|^\(user:[^:]*\):[0-9]*:|\1:20000:|" "$root"/etc/shadow

# kernel and initrd
cp "$root/boot/vmlinuz-$kernel" "$out"/vmlinuz
rm -rf "$root"/boot/*
tiny=$out/initrd
mkdir -p "$tiny"/bin "$tiny"/dev "$tiny"/proc "$tiny"/sys "$tiny"/root "$tiny"/modules
cp "$root"/bin/busybox "$tiny"/bin/
install -m 755 "$here"/initrd-init "$tiny"/init
for module in virtio_pci virtio_blk crc32c_generic ext4; do
  modprobe -d "$root" -S "$kernel" --show-depends "$module" | sed -n 's/^insmod \(\S*\).*/\1/p'
done | awk '!seen[$0]++' | while read -r file; do
  cp "$file" "$tiny"/modules/
  basename "$file" >>"$tiny"/modules/order
done
find "$root" "$tiny" -newermt "@$epoch" -exec touch -h -d "@$epoch" {} +
(cd "$tiny" && find . | sort | cpio --quiet --reproducible -o -H newc -R 0:0 | gzip -n -9 >"$out"/initrd.img)
rm -rf "$tiny"
