#!/bin/bash
# What tests/deploy_chart/test_units_boot.py does in the machine that it boots: a run of two learners, of which one is killed.
# Leaves what it saw in /result; the lines that it prints are for whoever reads a failure.
exec >/result/log 2>&1
trap 'journalctl --no-pager --unit "sottovoce-*" | tail --lines 80; systemctl poweroff --force --force' EXIT
own='sottovoce-coordinator sottovoce-eavesdropper sottovoce-learner@north sottovoce-learner@south'
asked='--coordinator localhost:7400 --identity /etc/sottovoce/identities/alice'
sottovoce=/opt/sottovoce/bin/sottovoce

# Each of them waits for up to 10 s.
for _ in {1..12}; do
  $sottovoce doctor $asked --eavesdropper localhost:7500 --learner-address localhost:7401 --learner-address localhost:7402 && well=1 && break
  systemctl is-failed $own && exit
done
[[ ${well:-} ]] || exit
stat --format '%n %a %u' /var/lib/private/sottovoce/* >/result/folders
for unit in $own; do
  echo "$unit $(ps -o uid= -p "$(systemctl show --property MainPID --value "$unit")")"
done >/result/users

cd /tmp || exit
$sottovoce run /etc/sottovoce/spec.yaml $asked --out /tmp/out &
run=$!
until journalctl --unit sottovoce-learner@north | grep --quiet '"state": "running"'; do sleep 0.2; done
systemctl kill --signal KILL sottovoce-learner@north
wait $run
echo $? >/result/run
systemctl show --property NRestarts --value sottovoce-learner@north >/result/restarts

systemctl stop $own
for unit in $own; do systemctl show --property Result --value "$unit"; done >/result/ends
